/* cddptrace - reports from the flight recorder files of a job's ranks.

     cc -O2 examples/cddptrace.c -o cddptrace -lpthread -lm
     CDDP_RECORD=/tmp/flight ./your_program              each rank writes a file to /tmp/flight
     ./cddptrace /tmp/flight/cddp-*.rec                  ranks that are late or missing in a call
     ./cddptrace -o trace.json /tmp/flight/cddp-*.rec    and a trace for https://ui.perfetto.dev

   Reads the files of a job that is running, hangs or was killed. If the files are of several jobs,
   it reports the newest job. A rank of an elastic job can have several files: each process that
   joined as this rank wrote its own file. */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_RANKS 4096
#define MAX_EARLIER 1024 /* files of ranks' earlier processes */

typedef struct rank_file {
  cddp_record_header head;
  cddp_record *records; /* by number; NULL: no file of this rank */
  int count;
} rank_file;

typedef struct call { /* one rank's record of one call of a group */
  const cddp_record *r;
  int rank;
} call;

static rank_file ranks[MAX_RANKS + MAX_EARLIER]; /* by rank; from MAX_RANKS on earlier processes' */
static int size, earlier;
static uint64_t job;
static int64_t born, last; /* ns, wall clock: creation of the job's files; the job's last record */

static int sane(int64_t t) { return t >= -(INT64_C(1) << 61) && t <= INT64_C(1) << 61; }

static int64_t wall(int rank, int64_t t) { return t + ranks[rank].head.wall_offset; }

static int by_number(const void *a, const void *b) {
  uint64_t x = ((const cddp_record *)a)->number, y = ((const cddp_record *)b)->number;
  return (x > y) - (x < y);
}

/* Keeps the file's records if its job is the newest so far. Returns 0 if the file is not a flight
   recorder's. */
static int load(const char *path) {
  rank_file f = {0}, *now, *old;
  int64_t t;
  FILE *in = fopen(path, "rb");
  int i, n = 0,
         ok = in != NULL && fread(&f.head, sizeof f.head, 1, in) == 1 &&
              memcmp(f.head.magic, "cddprec1", 8) == 0 && f.head.capacity == CDDP_RECORDS &&
              f.head.record_size == sizeof(cddp_record) && f.head.world_size <= MAX_RANKS &&
              f.head.rank < f.head.world_size && sane(f.head.wall_offset) && sane(f.head.created);
  if (ok) f.records = malloc(CDDP_RECORDS * sizeof *f.records);
  if (ok && f.records) n = (int)fread(f.records, sizeof *f.records, CDDP_RECORDS, in);
  if (in) fclose(in);
  if (!ok || !f.records || n != CDDP_RECORDS) return free(f.records), 0;
  f.head.host[sizeof f.head.host - 1] = 0;
  for (i = 0; i < n; i++) {
    cddp_record *r = &f.records[i];
    r->what[sizeof r->what - 1] = 0;
    for (char *c = r->what; *c; c++) *c = *c < ' ' || *c > '~' || strchr("\"\\", *c) ? '?' : *c;
    if (r->number && r->ended < r->enqueued) r->ended = 0; /* read while the rank was writing it */
    if (r->number && sane(r->enqueued) && sane(r->started) && sane(r->ended))
      f.records[f.count++] = *r;
  }
  qsort(f.records, (size_t)f.count, sizeof *f.records, by_number);
  if (size > 0 && job != f.head.job) {
    if (f.head.created + f.head.wall_offset < born) return free(f.records), 1; /* an older job */
    for (i = 0; i < MAX_RANKS + earlier; i++) free(ranks[i].records);
    memset(ranks, 0, sizeof ranks);
    size = earlier = 0;
  }
  t = f.head.created + f.head.wall_offset;
  if (size == 0 || t < born) born = t;
  job = f.head.job;
  if (size < (int)f.head.world_size) size = (int)f.head.world_size;
  now = &ranks[f.head.rank];
  if (now->records && earlier < MAX_EARLIER && f.head.pid != now->head.pid) {
    old = &ranks[MAX_RANKS + earlier++];
    *old = f.head.created < now->head.created ? f : *now; /* ranks[rank] is the newest process */
    if (old->records == f.records) return 1;
  } else {
    free(now->records);
  }
  *now = f;
  return 1;
}

static int by_call(const void *a, const void *b) {
  const call *x = a, *y = b;
  if (x->r->group != y->r->group) return x->r->group < y->r->group ? -1 : 1;
  if (x->r->sequence != y->r->sequence) return x->r->sequence < y->r->sequence ? -1 : 1;
  return x->rank - y->rank;
}

static void print_call(const cddp_record *r) {
  printf("%s", r->what);
  if (r->count) printf("(%" PRIu64 ")", r->count);
  if (r->sequence) printf(", call %" PRIu64 " of group %04" PRIx64, r->sequence, r->group & 0xffff);
}

/* The last operation of each rank; earlier processes of elastic jobs first. */
static void report_ranks(void) {
  for (int k = 0; k < size + earlier; k++) {
    int i = k < earlier ? (int)ranks[MAX_RANKS + k].head.rank : k - earlier;
    const rank_file *f = &ranks[k < earlier ? MAX_RANKS + k : i];
    const cddp_record *r = f->count ? &f->records[f->count - 1] : NULL;
    printf(k < earlier ? "before: rank %d" : "rank %d", i);
    if (!f->records) {
      printf(": no file\n");
      continue;
    }
    printf(" (pid %u on %s)%s: ", f->head.pid, f->head.host, f->head.left ? ", left" : "");
    if (!r) {
      printf("no operation yet\n");
      continue;
    }
    print_call(r);
    if (r->ended)
      printf(", ended %s %.3f ms before the job's last sign of life\n",
             r->result ? cddp_result_name((cddp_result)r->result) : "well",
             (double)(last - wall(i, r->ended)) * 1e-6);
    else
      printf(", %s for %.3f ms\n", r->started ? "in it" : "queued",
             (double)(last - wall(i, r->started ? r->started : r->enqueued)) * 1e-6);
  }
}

/* Elastic models: ranks that were lost or joined, as each process recorded them. */
static void report_elastic(void) {
  for (int i = 0; i < MAX_RANKS + earlier; i = i + 1 == size ? MAX_RANKS : i + 1)
    for (int k = 0; k < ranks[i].count; k++) {
      const cddp_record *r = &ranks[i].records[k];
      double ago = (double)(last - wall(i, r->enqueued)) * 1e-6;
      int rank = (int)ranks[i].head.rank;
      if (strcmp(r->what, "lost") == 0)
        printf("LOST: rank %" PRIu64 ", as rank %d found %.3f ms before the end\n", r->count, rank,
               ago);
      if (strcmp(r->what, "joined") == 0)
        printf("joined: rank %d (pid %u), in step %" PRIu64 ", %.3f ms before the end\n", rank,
               ranks[i].head.pid, r->count, ago);
    }
}

/* The reason why a rank is missing in a call. A rank that left the group recorded it in its
   file. */
static const char *missing_reason(const rank_file *f) {
  char host[sizeof f->head.host] = "";
  if (!f->records) return "has no file; it did not begin";
  if (f->head.left) return "left before";
  gethostname(host, sizeof host - 1);
  if (strcmp(host, f->head.host) == 0 && kill((pid_t)f->head.pid, 0) != 0 && errno == ESRCH)
    return "was killed, or exited without leaving the group, before";
  return "has not begun";
}

/* The last call of one group, calls[0 .. n): reports ranks that are missing while others wait. */
static void report_group(const call *calls, int n) {
  const cddp_record *end = calls[n - 1].r;
  int waiting = 0, i;
  char *seen = calloc((size_t)size, 1); /* 1: a member of the group, 2: began its last call */
  for (i = 0; seen && i < n; i++) {
    int there = calls[i].r->sequence == end->sequence;
    seen[calls[i].rank] = there ? 2 : seen[calls[i].rank] ? seen[calls[i].rank] : 1;
    waiting += there && (!calls[i].r->ended || calls[i].r->result);
  }
  for (i = 0; seen && waiting > 0 && i < size; i++) {
    if (seen[i] == 2 || (seen[i] == 0 && end->group != 0)) continue;
    printf("MISSING: rank %d %s ", i, missing_reason(&ranks[i]));
    print_call(end);
    printf(", where %d rank%s waited for it\n", waiting, waiting == 1 ? "" : "s");
  }
  free(seen);
}

/* Mean delay of each rank behind the first rank, in calls that several ranks made. */
static void report_late(const call *calls, int n) {
  double *sum = calloc((size_t)size, sizeof *sum);
  int *count = calloc((size_t)size, sizeof *count), i, k, end;
  for (i = 0; sum && count && i < n; i = end) {
    int64_t begin = INT64_MAX;
    for (end = i; end < n && calls[end].r->group == calls[i].r->group &&
                  calls[end].r->sequence == calls[i].r->sequence;
         end++)
      if (wall(calls[end].rank, calls[end].r->started) < begin)
        begin = wall(calls[end].rank, calls[end].r->started);
    for (k = i; k < end && end - i > 1; k++) {
      sum[calls[k].rank] += (double)(wall(calls[k].rank, calls[k].r->started) - begin) * 1e-3;
      count[calls[k].rank]++;
    }
  }
  for (i = 0; sum && count && i < size; i++)
    if (count[i])
      printf("late: rank %d began its calls %.1f us after the first rank, on average of %d\n", i,
             sum[i] / count[i], count[i]);
  free(sum), free(count);
}

static int report(void) {
  int n = 0, total = 0, i, k;
  call *calls;
  for (i = 0; i < MAX_RANKS + earlier; i++) total += ranks[i].count;
  if ((calls = malloc(((size_t)total + 1) * sizeof *calls)) == NULL) return 1;
  for (i = 0; i < MAX_RANKS + earlier; i++)
    for (k = 0; k < ranks[i].count; k++) {
      const cddp_record *r = &ranks[i].records[k];
      int64_t t = r->ended ? r->ended : r->started ? r->started : r->enqueued;
      if (wall(i, t) > last) last = wall(i, t);
      if (r->sequence && r->started) calls[n].r = r, calls[n++].rank = (int)ranks[i].head.rank;
    }
  qsort(calls, (size_t)n, sizeof *calls, by_call);
  printf("job %016" PRIx64 ", %d ranks, %d operations\n", job, size, total);
  report_ranks();
  report_elastic();
  report_late(calls, n);
  for (i = 0, k = 0; i < n; i++)
    if (i + 1 == n || calls[i + 1].r->group != calls[i].r->group)
      report_group(calls + k, i + 1 - k), k = i + 1;
  free(calls);
  return 0;
}

static int trace(const char *path) { /* the Trace Event format; times in us */
  FILE *out = fopen(path, "w");
  if (!out) return perror(path), 1;
  fprintf(out, "[");
  for (int i = 0; i < MAX_RANKS + earlier; i++) {
    if (!ranks[i].records) continue;
    fprintf(out, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,", i);
    fprintf(out, "\"args\":{\"name\":\"rank %u\"}},\n", ranks[i].head.rank);
    for (int k = 0; k < ranks[i].count; k++) {
      const cddp_record *r = &ranks[i].records[k];
      int64_t start = wall(i, r->started ? r->started : r->enqueued);
      int64_t end = r->ended ? wall(i, r->ended) : last;
      int instant = !r->started && r->ended; /* an event: cddp_ddp_ready */
      fprintf(out,
              "{\"name\":\"%s\",\"ph\":\"%s\",\"s\":\"t\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,"
              "\"dur\":%.3f,"
              "\"args\":{\"call\":%" PRIu64 ",\"group\":\"%04" PRIx64 "\",\"count\":%" PRIu64
              "}},\n",
              r->what, instant ? "i" : "X", i, r->engine, (double)(start - born) * 1e-3,
              instant || end < start ? 0.0 : (double)(end - start) * 1e-3, r->sequence,
              r->group & 0xffff, r->count);
    }
  }
  fprintf(out, "{}]\n");
  return fclose(out) ? (perror(path), 1) : 0;
}

int main(int argc, char **argv) {
  const char *out = NULL;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0, bad = argc < 2;
  for (int i = 1; i < argc && !help; i++) {
    if (strcmp(argv[i], "-o") == 0 && i + 1 < argc)
      out = argv[++i];
    else if (argv[i][0] == '-')
      bad = true;
    else if (!load(argv[i]))
      fprintf(stderr, "%s is no flight recorder's file\n", argv[i]);
  }
  if (help || bad || size == 0)
    fprintf(help ? stdout : stderr, "usage: cddptrace [-o trace.json] dir/cddp-*.rec\n"
                                    "  -o FILE  write a trace for https://ui.perfetto.dev too\n");
  if (help || bad || size == 0) return help ? 0 : bad ? 2 : 1;
  return report() || (out && trace(out));
}
