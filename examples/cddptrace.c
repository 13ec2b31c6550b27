/* cddptrace - reports from the flight recorder files of a job's ranks.

     cc -O2 examples/cddptrace.c -o cddptrace -lpthread -lm
     CDDP_RECORD=/tmp/flight ./your_program              each rank writes a file to /tmp/flight
     ./cddptrace /tmp/flight                             ranks that are late or missing in a call
     ./cddptrace -o trace.json /tmp/flight               and a trace for https://ui.perfetto.dev

   Reads files, or all files *.rec of a directory, of a job that is running, hangs or was killed. If
   ranks of the job still run on this host, the report is of now: a call that hangs has lasted until
   now. If the files are of several jobs, it reports the newest job. A rank of an elastic job can
   have several files: each process that joined as this rank wrote its own file. */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 4096
#define MAX_EARLIER 1024 /* files of ranks' earlier processes */

typedef struct rank_file {
  cddp_record_header head;
  cddp_record *records; /* by number; NULL: no file of this rank */
  int count;
  bool lives, gone; /* the process runs on this host, or has ended here; neither: not known */
} rank_file;

typedef struct call { /* one rank's record of one call of a group */
  const cddp_record *r;
  int rank;
} call;

static rank_file ranks[MAX_RANKS + MAX_EARLIER]; /* by rank; from MAX_RANKS on earlier processes' */
static int size, earlier;
static uint64_t job;
/* ns, wall clock: creation of the job's files; its last record; the same, or now while it runs. */
static int64_t born, recorded, last;

static int sane(int64_t t) { return t >= -(INT64_C(1) << 61) && t <= INT64_C(1) << 61; }

static int64_t wall(int rank, int64_t t) { return t + ranks[rank].head.wall_offset; }

static int by_number(const void *a, const void *b) {
  uint64_t x = ((const cddp_record *)a)->number, y = ((const cddp_record *)b)->number;
  return (x > y) - (x < y);
}

static int64_t nanoseconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Finds out whether a file's process still runs, if it was on this host. A process that started
   later than the file was created has only got its number. */
static void look_for_process(rank_file *f) {
  char host[sizeof f->head.host] = "", path[64], text[1024], *at;
  int64_t started = INT64_MAX, now = nanoseconds(CLOCK_REALTIME);
  unsigned long long ticks = 0;
  FILE *in;
  gethostname(host, sizeof host - 1);
  if (!f->records || strcmp(host, f->head.host) != 0) return;
  snprintf(path, sizeof path, "/proc/%u/stat", f->head.pid);
  if ((in = fopen(path, "r")) != NULL) {
    size_t n = fread(text, 1, sizeof text - 1, in);
    fclose(in);
    text[n] = 0;
    at = strrchr(text, ')'); /* the end of the name, field 2; the state is 3, the start 22 */
    for (int field = at && at[1] && at[2] != 'Z' ? 2 : 22; at && field < 22; field++)
      if ((at = strchr(at + 1, ' ')) && field == 21) ticks = strtoull(at, NULL, 10);
    if (ticks > 0)
      started = now - nanoseconds(CLOCK_BOOTTIME) +
                (int64_t)((double)ticks / (double)sysconf(_SC_CLK_TCK) * 1e9);
  }
  f->lives = started <= f->head.created + f->head.wall_offset + 1000000000;
  f->gone = !f->lives;
}

/* Keeps the file's records if its job is the newest so far. Returns NULL, or what is wrong with the
   file. */
static const char *load(const char *path) {
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
  if (!ok || !f.records) return "is no flight recorder's file";
  if (n != CDDP_RECORDS) return free(f.records), "is incomplete";
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
    if (f.head.created + f.head.wall_offset < born) return free(f.records), NULL; /* an older job */
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
    if (old->records == f.records) return NULL;
  } else {
    free(now->records);
  }
  *now = f;
  return NULL;
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

/* The end of a process's calls that have not ended. */
static int64_t until(const rank_file *f) { return f->lives ? last : recorded; }

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
      printf(", ended %s %.3f ms before %s\n",
             r->result ? cddp_result_name((cddp_result)r->result) : "well",
             (double)(last - wall(i, r->ended)) * 1e-6,
             last > recorded ? "now" : "the job's last sign of life");
    else
      printf(", %s for %.3f ms%s\n", r->started ? "in it" : "queued",
             (double)(until(f) - wall(i, r->started ? r->started : r->enqueued)) * 1e-6,
             f->lives ? " until now" : "");
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

/* Prints why a rank has not begun a call that others made.
     end        the call
     timed_out  the others have given up */
static void print_missing(int rank, const cddp_record *end, int waiting, bool timed_out) {
  const rank_file *f = &ranks[rank];
  const cddp_record *r = f->count ? &f->records[f->count - 1] : NULL;
  bool elsewhere = r && r->sequence && (r->result || !r->ended);
  printf("MISSING: rank %d ", rank);
  if (elsewhere) {
    printf("was in ");
    print_call(r);
    if (r->ended) printf(", which ended %s", cddp_result_name((cddp_result)r->result));
    printf("%s, and did not begin ", !r->ended && f->gone ? " when its process ended" : "");
  } else {
    printf("%s ", !f->records               ? "has no file; it did not begin"
                  : f->head.left            ? "left before"
                  : f->gone && timed_out    ? "did not reach"
                  : f->gone ? "was killed, or exited without leaving the group, before"
                            : "has not begun");
  }
  print_call(end);
  printf(", where %d rank%s waited for it%s\n", waiting, waiting == 1 ? "" : "s",
         timed_out ? " until the time-out" : "");
}

/* The last call of one group, calls[0 .. n): reports ranks that are missing while others wait. */
static void report_group(const call *calls, int n) {
  const cddp_record *end = calls[n - 1].r;
  int waiting = 0, i;
  bool timed_out = false;
  char *seen = calloc((size_t)size, 1); /* 1: a member of the group, 2: began its last call */
  for (i = 0; seen && i < n; i++) {
    int there = calls[i].r->sequence == end->sequence;
    seen[calls[i].rank] = there ? 2 : seen[calls[i].rank] ? seen[calls[i].rank] : 1;
    waiting += there && (!calls[i].r->ended || calls[i].r->result);
    timed_out = timed_out || (there && calls[i].r->result == CDDP_TIMEOUT);
  }
  for (i = 0; seen && waiting > 0 && i < size; i++) {
    if (seen[i] == 2 || (seen[i] == 0 && end->group != 0)) continue;
    print_missing(i, end, waiting, timed_out);
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
  recorded = last = 0;
  for (i = 0; i < MAX_RANKS + earlier; i++) total += ranks[i].count;
  if ((calls = malloc(((size_t)total + 1) * sizeof *calls)) == NULL) return 1;
  for (i = 0; i < MAX_RANKS + earlier; i++)
    for (k = 0; k < ranks[i].count; k++) {
      const cddp_record *r = &ranks[i].records[k];
      int64_t t = r->ended ? r->ended : r->started ? r->started : r->enqueued;
      if (wall(i, t) > recorded) recorded = wall(i, t);
      if (r->sequence && r->started) calls[n].r = r, calls[n++].rank = (int)ranks[i].head.rank;
    }
  last = recorded;
  for (i = 0; i < MAX_RANKS + earlier; i++) {
    look_for_process(&ranks[i]);
    if (ranks[i].lives && nanoseconds(CLOCK_REALTIME) > last) last = nanoseconds(CLOCK_REALTIME);
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
      int64_t end = r->ended ? wall(i, r->ended) : until(&ranks[i]);
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

/* Loads a file, or the files *.rec of a directory. Returns NULL, or what is wrong. */
static const char *load_all(const char *path) {
  DIR *d = opendir(path);
  const char *wrong = "has no file *.rec";
  struct dirent *e;
  char name[4096];
  if (d == NULL) return load(path);
  while ((e = readdir(d)) != NULL) {
    size_t n = strlen(e->d_name);
    if (n < 4 || strcmp(e->d_name + n - 4, ".rec") != 0) continue;
    snprintf(name, sizeof name, "%s/%s", path, e->d_name);
    wrong = load(name);
    if (wrong) fprintf(stderr, "%s %s\n", name, wrong);
    wrong = NULL;
  }
  closedir(d);
  return wrong;
}

int main(int argc, char **argv) {
  const char *out = NULL, *wrong;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0, bad = argc < 2;
  for (int i = 1; i < argc && !help; i++) {
    if (strcmp(argv[i], "-o") == 0 && i + 1 < argc)
      out = argv[++i];
    else if (argv[i][0] == '-')
      bad = true;
    else if ((wrong = load_all(argv[i])) != NULL)
      fprintf(stderr, "%s %s\n", argv[i], wrong);
  }
  if (help || bad || size == 0)
    fprintf(help ? stdout : stderr, "usage: cddptrace [-o trace.json] dir, or dir/cddp-*.rec\n"
                                    "  -o FILE  write a trace for https://ui.perfetto.dev too\n");
  if (help || bad || size == 0) return help ? 0 : bad ? 2 : 1;
  return report() || (out && trace(out));
}
