/* startup.c - times cddp_init, and a store server under many clients. Prints lines
     startup RANKS MILLISECONDS     from cddp_spawn's call to the last rank's return from cddp_init
     store CLIENTS CONNECT_S OPERATIONS_PER_S THREADS   of the server's process meanwhile
     hosts RANKS HOSTS MILLISECONDS as startup, the ranks of 8 being kept from sharing memory with
                                    others, so that they meet, and take their first step, by TCP
   Options: --rounds N, --clients N, --ranks N, --hosts RANKS (of these two that line alone) */

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "bench.h"
#include <dirent.h>
#include <sys/resource.h>

enum { WORKERS = 4, ROUNDS = 64 };
static int rounds = 5, clients = 10000, workers_clients, port;

static struct shared {
  double ready[CDDP__MAX_RANKS];
  int failed;
  uint32_t connected, finished, go;
} *shared;

static int per_host; /* ranks that count as those of one host; 0: all */

static int init_only(int rank, void *arg) {
  cddp_group *g;
  char host[16];
  (void)arg;
  snprintf(host, sizeof host, "%d", per_host > 0 ? rank / per_host : 0);
  if (per_host > 0) setenv("CDDP_HOST_ID", host, 1);
  if (cddp_init(&g, NULL) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 1;
  shared->ready[rank] = bench_now();
  cddp_destroy(g);
  return 0;
}

static void time_init(int ranks) {
  double t[ROUNDS], start, last;
  int i, r;
  for (i = 0; i < rounds; i++) {
    start = last = bench_now();
    if (cddp_spawn(init_only, NULL, ranks) != CDDP_OK) {
      fprintf(stderr, "%d ranks: %s\n", ranks, cddp_error());
      exit(1);
    }
    for (r = 0; r < ranks; r++) last = shared->ready[r] > last ? shared->ready[r] : last;
    t[i] = (last - start) * 1e3;
  }
  if (per_host > 0)
    printf("hosts %d %d %.3f\n", ranks, (ranks + per_host - 1) / per_host, bench_median(t, rounds));
  else
    printf("startup %d %.3f\n", ranks, bench_median(t, rounds));
  fflush(stdout);
}

/* --- the store --- */

static void wait_for(const uint32_t *word, uint32_t want) {
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < want) usleep(1000);
}

static void worker(int me) { /* holds its share of the clients; each adds once */
  cddp_store **all = calloc((size_t)workers_clients, sizeof *all);
  cddp_store_desc d = {0};
  char url[64];
  int i;
  (void)me;
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  d.init_method = url;
  d.timeout_s = 60;
  for (i = 0; i < workers_clients; i++) {
    if (cddp_store_create(&all[i], &d) != CDDP_OK) {
      fprintf(stderr, "client %d: %s\n", i, cddp_error());
      _exit(1);
    }
    __atomic_fetch_add(&shared->connected, 1, __ATOMIC_RELEASE);
  }
  wait_for(&shared->go, 1);
  for (i = 0; i < workers_clients; i++) {
    int64_t total;
    if (cddp_store_add(all[i], "count", 1, &total) != CDDP_OK) {
      fprintf(stderr, "add: %s\n", cddp_error());
      _exit(1);
    }
  }
  __atomic_fetch_add(&shared->finished, 1, __ATOMIC_RELEASE);
  wait_for(&shared->go, 2);
  for (i = 0; i < workers_clients; i++) cddp_store_destroy(all[i]);
}

static int threads(void) {
  DIR *d = opendir("/proc/self/task");
  struct dirent *e;
  int n = 0;
  while (d != NULL && (e = readdir(d)) != NULL) n += e->d_name[0] != '.';
  if (d != NULL) closedir(d);
  return n;
}

/* Forks the workers before the server's thread exists: they get its port through a pipe. */
static void start_workers(int *fd) {
  int i, pipes[2];
  if (pipe(pipes) != 0) bench_die("pipe");
  for (i = 0; i < WORKERS; i++) {
    pid_t pid = fork();
    if (pid < 0) bench_die("fork");
    if (pid > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pipes[1]);
    if (read(pipes[0], &port, sizeof port) != sizeof port) _exit(1);
    worker(i);
    _exit(0);
  }
  close(pipes[0]);
  *fd = pipes[1];
}

static void time_store(void) {
  cddp_store_desc d = {0};
  cddp_store *s;
  double t0, t1, t2;
  int fd, i, n, status;
  workers_clients = clients / WORKERS;
  clients = workers_clients * WORKERS;
  start_workers(&fd);
  d.init_method = "tcp://127.0.0.1:0";
  d.is_server = true;
  if (cddp_store_create(&s, &d) != CDDP_OK) {
    fprintf(stderr, "store: %s\n", cddp_error());
    exit(1);
  }
  port = cddp_store_port(s);
  t0 = bench_now();
  for (i = 0; i < WORKERS; i++)
    if (write(fd, &port, sizeof port) != sizeof port) bench_die("write");
  while (__atomic_load_n(&shared->connected, __ATOMIC_ACQUIRE) < (uint32_t)clients) {
    usleep(1000);
    if (waitpid(-1, &status, WNOHANG) > 0) exit(1); /* a worker has failed and said why */
  }
  t1 = bench_now();
  n = threads();
  __atomic_store_n(&shared->go, 1, __ATOMIC_RELEASE);
  wait_for(&shared->finished, WORKERS);
  t2 = bench_now();
  printf("store %d %.3f %.0f %d\n", clients, t1 - t0, clients / (t2 - t1), n);
  __atomic_store_n(&shared->go, 2, __ATOMIC_RELEASE);
  while (wait(&status) > 0) continue;
  cddp_store_destroy(s);
}

int main(int argc, char **argv) {
  static const int ranks[] = {2, 8, 32, 128};
  struct rlimit files;
  int i, across = 0, alone = 0;
  for (i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--hosts") == 0) across = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--ranks") == 0) alone = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--rounds") == 0) rounds = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--clients") == 0) clients = atoi(argv[i + 1]);
  }
  if (rounds < 1 || rounds > ROUNDS) return 2;
  shared = (struct shared *)(void *)bench_map(sizeof *shared, true);
  if (across > 0 || alone > 0) {
    per_host = across > 0 ? 8 : 0;
    time_init(across > 0 ? across : alone);
    return 0;
  }
  for (i = 0; i < 4; i++) time_init(ranks[i]);
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < (rlim_t)clients + 100) {
    fprintf(stderr, "store: only %ld descriptors, so fewer clients than %d\n",
            (long)files.rlim_max, clients);
    clients = (int)files.rlim_max - 100;
  }
  time_store();
  return 0;
}
