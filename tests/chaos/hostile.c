/* hostile.c - a job that starts among hostile connections.

   Four ranks meet while strangers hold connections to everything that listens: rank 0's port and
   the coordinator's Unix socket. They say nothing, garbage, HTTP, half of a frame or of a hello, or
   a byte now and then. The ranks that come after them must be ready within a second of what it
   takes without them. (What the store does with each kind of
   stranger, with secrets and with replayed proofs is in store.c.) */
#define _GNU_SOURCE
#include <pthread.h>

static int threads_started;

static int count_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *arg) {
  threads_started++;
  return pthread_create(thread, attributes, run, arg);
}

#define CDDP_IMPLEMENTATION
#define pthread_create count_thread
#include "../../cddp.h"
#undef pthread_create

#include "../ranks.h"

#include <arpa/inet.h>
#include <sys/prctl.h>
#include <sys/resource.h>

enum { RANKS = 4 };

static struct shared {
  int port;
  bool secret;
  int serves;          /* 1: serve_poison is ready; -1: it failed */
  double timeout_s;
  rlim_t files;        /* that rank 0 may have open; 0: as the test */
  double began[RANKS], ready[RANKS]; /* test_now() when cddp_init was called, and returned */
  int threads[RANKS];  /* that cddp_init started */
  int ranks[RANKS];    /* which rank each process says it is */
  cddp_result result[RANKS];
  char text[RANKS][CDDP__ERROR_MAX];
} *shared;

static int life(int slot, void *arg) {
  cddp_group_desc d;
  cddp_group *g = NULL;
  float x = 1;
  char url[64];
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (shared->files > 0 && slot == 0) {
    struct rlimit files = {shared->files, shared->files};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  }
  memset(&d, 0, sizeof d);
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", shared->port);
  d.init_method = url;
  d.rank = shared->ranks[slot];
  d.world_size = RANKS;
  d.timeout_s = shared->timeout_s;
  d.secret = shared->secret ? "sesame" : "";
  shared->began[slot] = test_now();
  shared->result[slot] = cddp_init(&g, &d);
  shared->ready[slot] = test_now();
  shared->threads[slot] = threads_started;
  if (g != NULL) shared->result[slot] = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
  snprintf(shared->text[slot], CDDP__ERROR_MAX, "%s", cddp_error());
  cddp_destroy(g);
  return shared->result[slot] != CDDP_OK || x != RANKS;
}

static void prepare(bool secret) {
  int i;
  memset(shared, 0, sizeof *shared);
  shared->port = ranks_free_port();
  shared->secret = secret;
  shared->timeout_s = 20;
  for (i = 0; i < RANKS; i++) shared->ranks[i] = i;
}

/* --- strangers --- */

static int to_port(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

/* The address of the node's socket, whose name anybody of this user can tell. */
static cddp__address coordinator(void) {
  cddp__address a;
  cddp__config at;
  char name[48];
  bool here;
  memset(&at, 0, sizeof at);
  snprintf(at.init_method, sizeof at.init_method, "tcp://127.0.0.1:%d", shared->port);
  snprintf(at.host, sizeof at.host, "127.0.0.1");
  at.port = shared->port;
  snprintf(at.run, sizeof at.run, "cddp/0/0");
  at.listen_fd = -1;
  CHECK_OK(cddp__node_name(&at, shared->secret ? "sesame" : "", name, &here));
  cddp__unix_name(&a, name);
  return a;
}

/* Waits until a rank listens there. */
static int to_coordinator(double seconds) {
  double deadline = test_now() + seconds;
  cddp__address a = coordinator();
  int fd;
  do (void)cddp__connect_address(&a, cddp__now() + 1, &fd);
  while (fd < 0 && test_now() < deadline && (ranks_sleep(0.001), true));
  return fd;
}

/* The i-th stranger says what it has to say. */
static void speak(int fd, int i) {
  static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  static const unsigned char frame[] = {0, 0xce, 0xf7, 0x85, 0x3c, 1, 9, 0, 0, 0, 0, 0, 0, 0, 'k'};
  static const unsigned char hello[] = {'C', 'D', 'F', 'R', CDDP__FRAME_MESSAGE, 0, 0, 0,
                                        CDDP__RENDEZVOUS_RANK, 0, 0, 0, CDDP_U8, 0, 0, 0,
                                        sizeof(cddp__rank_info), 0, 0, 0, 0, 0, 0, 0, 1, 2, 3};
  unsigned char noise[200];
  size_t k;
  ssize_t sent = 0;
  for (k = 0; k < sizeof noise; k++) noise[k] = (unsigned char)ranks_mix((uint64_t)i, k, 3);
  switch (i % 7) {
  case 0: break; /* silence */
  case 1: sent = send(fd, http, sizeof http - 1, MSG_NOSIGNAL); break;
  case 2: sent = send(fd, noise, 1 + (size_t)i % sizeof noise, MSG_NOSIGNAL); break;
  case 3: sent = send(fd, frame, sizeof frame, MSG_NOSIGNAL); break;
  case 4: sent = send(fd, hello, sizeof hello, MSG_NOSIGNAL); break;
  case 5: sent = send(fd, CDDP__AUTH_HELLO, 8, MSG_NOSIGNAL); break;
  default: sent = send(fd, noise, 1, MSG_NOSIGNAL); /* and a byte a minute later */
  }
  (void)sent; /* hung up on already */
}

/* Ranks 0 and 1 wait; `count` strangers come to rank 0's port and the coordinator; then the others.
   Returns the time from their start until all are ready. */
static double start_among(int count, bool secret) {
  pid_t pids[RANKS];
  int status[RANKS], *fds = (int *)malloc((2 * (size_t)count + 1) * sizeof *fds), i, r, held = 0;
  double begin, last = 0;
  prepare(secret);
  for (i = 0; i < 2; i++) pids[i] = ranks_fork(life, i, NULL);
  fds[0] = to_coordinator(10);
  CHECK(fds[0] >= 0);
  close(fds[0]);
  for (i = 0; i < 1000 && (fds[0] = to_port(shared->port)) < 0; i++) ranks_sleep(0.001);
  close(fds[0]);
  for (i = 0; i < count; i++) {
    int fd = i % 2 ? to_coordinator(10) : to_port(shared->port);
    if (fd < 0) continue;
    speak(fd, i / 2);
    fds[held++] = fd;
  }
  CHECK(held >= count * 9 / 10);
  begin = test_now();
  for (i = 2; i < RANKS; i++) pids[i] = ranks_fork(life, i, NULL);
  ranks_join(pids, RANKS, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, RANKS));
  for (r = 0; r < RANKS; r++) {
    if (shared->result[r] != CDDP_OK) fprintf(stderr, "  rank %d: %s\n", r, shared->text[r]);
    if (shared->ready[r] > last) last = shared->ready[r];
  }
  for (i = 0; i < held; i++) close(fds[i]);
  free(fds);
  return last - begin;
}

static void test_start(void) {
  double alone = start_among(0, false), some = start_among(100, false),
         secret = start_among(100, true), many = start_among(1000, false);
  fprintf(stderr, "  ready after %.3f s; among 100: %.3f s, with a secret: %.3f s, 1000: %.3f s\n",
          alone, some, secret, many);
  CHECK(some < alone + RANKS_WITHIN(1.0));
  CHECK(secret < alone + RANKS_WITHIN(1.0));
  CHECK(many < alone + RANKS_WITHIN(1.0));
}

/* They keep coming while the ranks meet: a rank may be dropped among them and has to come again. A
   process of its own, as ranks are forked meanwhile; it is killed in the end. */
static int storm(int rank, void *arg) {
  pid_t parent = getppid();
  int fds[256], n = 0;
  (void)rank;
  (void)arg;
  memset(fds, 0xff, sizeof fds);
  while (getppid() == parent) {
    if (fds[n] >= 0) close(fds[n]);
    fds[n] = to_coordinator(0);
    n = (n + 1) % 256;
  }
  return 0;
}

static void test_storm(void) {
  pid_t pids[RANKS], stranger;
  int status[RANKS], i;
  double begin;
  prepare(false);
  pids[0] = ranks_fork(life, 0, NULL);
  close(to_coordinator(10));
  for (i = 1; i < RANKS; i++) pids[i] = 0;
  stranger = ranks_fork(storm, 0, NULL);
  ranks_sleep(0.05); /* it is under way */
  begin = test_now();
  for (i = 1; i < RANKS; i++) pids[i] = ranks_fork(life, i, NULL);
  ranks_join(pids, RANKS, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, RANKS));
  CHECK(test_now() - begin < RANKS_WITHIN(3.0));
  for (i = 0; i < RANKS; i++)
    if (shared->result[i] != CDDP_OK) fprintf(stderr, "  rank %d: %s\n", i, shared->text[i]);
  kill(stranger, SIGKILL);
  waitpid(stranger, NULL, 0);
}

/* --- strangers at the coordinator's socket are dropped under a deadline of their own --- */

static bool hangs_up(int fd, double seconds) {
  struct pollfd p;
  char c;
  p.fd = fd;
  p.events = POLLIN;
  return poll(&p, 1, (int)(seconds * 1000)) == 1 && recv(fd, &c, 1, MSG_DONTWAIT) <= 0;
}

static void test_dropped(void) {
  pid_t pid;
  int status, fds[7], i;
  prepare(false);
  pid = ranks_fork(life, 0, NULL);
  for (i = 0; i < 7; i++) {
    fds[i] = to_coordinator(10);
    CHECK(fds[i] >= 0);
    speak(fds[i], i);
  }
  for (i = 0; i < 7; i++) { /* rank 0 waits on, for 20 s */
    CHECK(hangs_up(fds[i], RANKS_WITHIN(CDDP__GREETING_S + 2)));
    close(fds[i]);
  }
  CHECK(waitpid(pid, &status, WNOHANG) == 0);
  kill(pid, SIGKILL);
  waitpid(pid, &status, 0);
}

/* --- a message that is right but for a rank that no job has, and says that it joins --- */

static void test_no_such_rank(void) {
  struct {
    cddp__frame_head head;
    cddp__rank_info info;
  } m;
  pid_t pids[RANKS];
  int status[RANKS], fd, i, n = RANKS - 1;
  memset(&m, 0, sizeof m);
  m.head = cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_RANK, CDDP_U8, sizeof m.info,
                               sizeof m.info);
  m.info.version = CDDP_VERSION;
  m.info.world_size = RANKS;
  m.info.rank = 0x10000000;
  m.info.pid = (uint32_t)getpid();
  m.info.joins = 1;
  snprintf(m.info.backend, sizeof m.info.backend, "cpu");
  prepare(false);
  for (i = 0; i < n; i++) pids[i] = ranks_fork(life, i, NULL);
  fd = to_coordinator(10);
  CHECK(fd >= 0 && send(fd, &m, sizeof m, MSG_NOSIGNAL) == (ssize_t)sizeof m);
  ranks_join(pids, n, RANKS_WITHIN(20), status);
  for (i = 0; i < n; i++) {
    CHECK_EQ(shared->result[i], CDDP_MISMATCH);
    CHECK(strstr(shared->text[i], "rank 268435456 (pid ") != NULL);
  }
  close(fd);
}

/* --- the rendezvous needs no thread, whoever connects to rank 0's port --- */

static void test_no_thread(void) {
  pid_t pids[RANKS];
  int status[RANKS], i, stranger;
  for (i = 0; i < 2; i++) {
    prepare(false);
    pids[0] = ranks_fork(life, 0, NULL);
    close(to_coordinator(10)); /* rank 0 is the coordinator: no other rank looks for it */
    stranger = i == 1 ? to_port(shared->port) : -1;
    for (int k = 1; k < RANKS; k++) pids[k] = ranks_fork(life, k, NULL);
    ranks_join(pids, RANKS, RANKS_WITHIN(20), status);
    CHECK(ranks_exited_well(status, RANKS));
    for (int k = 0; k < RANKS; k++) CHECK_EQ(shared->threads[k], 0);
    if (stranger >= 0) close(stranger);
  }
}

/* --- a stranger that sends the coordinator well-formed messages without an end --- */

static int stream_messages(int slot, void *arg) {
  cddp__frame_head h[1000]; /* many in a call: faster than they can be received */
  int fd = to_coordinator(10), i;
  size_t total = 0;
  ssize_t n;
  (void)slot, (void)arg;
  for (i = 0; i < 1000; i++) h[i] = cddp__frame_head_of(CDDP__FRAME_MESSAGE, 0, CDDP_U8, 0, 0);
  while ((n = send(fd, h, sizeof h, MSG_NOSIGNAL)) > 0 || errno == EAGAIN)
    if (n > 0) total += (size_t)n;
  CHECK(total < 1000000); /* what the system holds: the first message ended the connection */
  close(fd);
  return test_failures != 0;
}

static void test_stream(void) {
  pid_t pids[RANKS + 1];
  int status[RANKS + 1], k;
  prepare(false);
  pids[0] = ranks_fork(life, 0, NULL);
  pids[RANKS] = ranks_fork(stream_messages, 0, NULL);
  ranks_sleep(0.3);
  for (k = 1; k < RANKS; k++) pids[k] = ranks_fork(life, k, NULL);
  ranks_join(pids, RANKS + 1, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, RANKS + 1));
}

/* --- a coordinator that ends half-way through the table that it sends --- */

static void test_half_table(void) {
  size_t bytes = cddp__table_bytes(RANKS, 1);
  cddp__frame_head h =
      cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_WAIT, CDDP_U8, 0, 0);
  cddp__address a;
  pid_t pid;
  int listener, fd, status;
  char rank[sizeof h + sizeof(cddp__rank_info)], part[40] = {0};
  prepare(false);
  a = coordinator();
  CHECK_EQ(cddp__listen_address(&a, &listener), 0);
  pid = ranks_fork(life, 1, NULL);
  while ((fd = accept(listener, NULL, NULL)) < 0) ranks_sleep(0.001);
  CHECK_EQ(recv(fd, rank, sizeof rank, MSG_WAITALL), sizeof rank);
  CHECK_EQ(send(fd, &h, sizeof h, MSG_NOSIGNAL), sizeof h);
  h = cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_TABLE, CDDP_U8, bytes, bytes);
  CHECK_EQ(send(fd, &h, sizeof h, MSG_NOSIGNAL), sizeof h);
  CHECK_EQ(send(fd, part, sizeof part, MSG_NOSIGNAL), sizeof part);
  close(fd);
  close(listener);
  ranks_join(&pid, 1, RANKS_WITHIN(20), &status);
  CHECK_IS(shared->result[1], CDDP_PEER_LOST);
  CHECK(strstr(shared->text[1], "died during the rendezvous") != NULL);
}

/* --- a coordinator that sends a damaged table, and ends --- */

enum { HOST_HUGE, HOST_NEGATIVE, HOST_EMPTY, NO_PID, FOREIGN_PID, NO_PORT, NO_END, DAMAGES };

static void test_damaged_table(void) {
  static struct {
    unsigned char token[16];
    cddp__host_entry hosts[2];
    cddp__rank_entry ranks[RANKS];
  } table;
  cddp__rank_info info;
  cddp__address a;
  pid_t pid;
  int listener, fd, status, kind, i;
  for (kind = 0; kind < DAMAGES; kind++) {
    cddp__frame_head h =
        cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_WAIT, CDDP_U8, 0, 0);
    prepare(false);
    a = coordinator();
    CHECK_EQ(cddp__listen_address(&a, &listener), 0);
    pid = ranks_fork(life, 1, NULL);
    while ((fd = accept(listener, NULL, NULL)) < 0) ranks_sleep(0.001);
    CHECK_EQ(recv(fd, &info, sizeof h, MSG_WAITALL), sizeof h);
    CHECK_EQ(recv(fd, &info, sizeof info, MSG_WAITALL), sizeof info);
    memset(&table, 0, sizeof table);
    memset(table.hosts[1].name, 'A', sizeof table.hosts[1].name);
    for (i = 0; i < RANKS; i++) {
      table.ranks[i].host = i == 1;
      table.ranks[i].pid = i == 1 ? info.pid : 1;
      table.ranks[i].port = 1;
    }
    if (kind == HOST_HUGE) table.ranks[0].host = 0x7ffffff;
    if (kind == HOST_NEGATIVE) table.ranks[0].host = -0x7ffffff;
    if (kind == HOST_EMPTY) table.ranks[1].host = 0;
    if (kind == NO_PID) table.ranks[2].pid = 0;
    if (kind == FOREIGN_PID) table.ranks[1].pid++;
    if (kind == NO_PORT) table.ranks[3].port = 65536;
    if (kind == NO_END) table.ranks[0].host = 1, table.ranks[1].host = 0; /* the name is shown */
    CHECK_EQ(send(fd, &h, sizeof h, MSG_NOSIGNAL), sizeof h);
    h = cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_TABLE, CDDP_U8, sizeof table,
                            sizeof table);
    CHECK_EQ(send(fd, &h, sizeof h, MSG_NOSIGNAL | MSG_MORE), sizeof h);
    CHECK_EQ(send(fd, &table, sizeof table, MSG_NOSIGNAL), sizeof table);
    close(fd);
    close(listener);
    ranks_join(&pid, 1, RANKS_WITHIN(20), &status);
    if (kind != NO_END) {
      CHECK_IS(shared->result[1], CDDP_MISMATCH);
      CHECK(strstr(shared->text[1], "the rank table is damaged") != NULL);
    } else { /* without descriptors */
      CHECK_IS(shared->result[1], CDDP_SYSTEM);
    }
  }
}

/* --- peers that send without a pause: the time-out holds, and memory stays --- */

static long peak_kib(pid_t pid) {
  char path[64], line[128];
  long kib = -1;
  FILE *f;
  snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
  f = fopen(path, "r");
  while (f != NULL && fgets(line, sizeof line, f) != NULL) (void)sscanf(line, "VmHWM: %ld", &kib);
  if (f != NULL) fclose(f);
  return kib;
}

/* Sends a frame without a pause until the other end closes, at most for some seconds. */
static void flood(int fd, const void *frame, size_t size) {
  double end = test_now() + RANKS_WITHIN(6);
  char many[1 << 16];
  size_t n = 0;
  struct pollfd p;
  CHECK(nice(19) != -1); /* ranks get their turns */
  for (; n + size <= sizeof many; n += size) memcpy(many + n, frame, size);
  p.fd = fd;
  p.events = POLLOUT;
  while (test_now() < end && poll(&p, 1, 100) >= 0 &&
         (send(fd, many, n, MSG_NOSIGNAL) > 0 || errno == EAGAIN)) {}
}

typedef struct rank_frame {
  cddp__frame_head head;
  cddp__rank_info info;
} rank_frame;

/* The RANK of a rank of this job, as a stranger can guess it. */
static rank_frame rank_frame_of(uint32_t rank) {
  rank_frame m;
  memset(&m, 0, sizeof m);
  m.head = cddp__frame_head_of(CDDP__FRAME_MESSAGE, CDDP__RENDEZVOUS_RANK, CDDP_U8, sizeof m.info,
                               sizeof m.info);
  m.info.version = CDDP_VERSION;
  m.info.world_size = RANKS;
  m.info.rank = rank;
  m.info.pid = 7;
  m.info.run = cddp__hash64(0, "cddp/0/0", strlen("cddp/0/0"));
  snprintf(m.info.backend, sizeof m.info.backend, "cpu");
  return m;
}

/* slot: the number that it repeats, or RANKS: all numbers, and beyond; RANKS + 1: garbage. */
static int flood_root(int slot, void *arg) {
  static const unsigned char token[sizeof ((cddp__root_search *)0)->proof_salt];
  cddp__connection c;
  rank_frame m;
  int fd = to_port(shared->port);
  uint32_t k;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  CHECK(fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  cddp__connection_begin(&c, NULL, fd, true);
  CHECK_OK(cddp__connection_begin_proof(&c, "", "rendezvous", token, sizeof token));
  while (!cddp__connection_progress(&c) && c.state != CDDP__CONNECTION_ENDED) ranks_sleep(0.001);
  for (k = 1; slot == RANKS && k < 20000; k++) {
    m = rank_frame_of(k);
    if (cddp__send_message(&c, CDDP__RENDEZVOUS_RANK, &m.info, sizeof m.info, cddp__now() + 5) !=
        CDDP_OK)
      break;
  }
  m = rank_frame_of((uint32_t)slot);
  if (slot <= RANKS) flood(fd, &m, sizeof m);
  else flood(fd, "garbage", 7);
  cddp__connection_close(&c);
  return test_failures != 0;
}

/* Strangers flood rank 0. */
static void test_flood_root(void) {
  pid_t pids[4];
  int status[4], slot, k;
  for (slot = 1; slot <= RANKS + 1; slot += slot == 1 ? RANKS - 1 : 1) {
    double begin = test_now();
    long before, after = 0, kib;
    prepare(false);
    shared->timeout_s = 2;
    setenv("CDDP_HOST_ID", "a", 1);
    pids[0] = ranks_fork(life, 0, NULL);
    unsetenv("CDDP_HOST_ID");
    for (k = 0; k < 1000 && ranks_port_is_free(shared->port); k++) ranks_sleep(0.001);
    before = peak_kib(pids[0]);
    for (k = 1; k < 4; k++) pids[k] = ranks_fork(flood_root, slot, NULL);
    while (test_now() < begin + RANKS_WITHIN(12) && waitpid(pids[0], status, WNOHANG) == 0) {
      if ((kib = peak_kib(pids[0])) > after) after = kib;
      ranks_sleep(0.005);
    }
    CHECK(shared->ready[0] > 0);
    fprintf(stderr, "  %d: rank 0 ended after %.2f s with %ld KiB more: %s\n", slot,
            shared->ready[0] - shared->began[0], after - before, shared->text[0]);
    CHECK(shared->ready[0] - shared->began[0] < 2 * 1.1 + RANKS_WITHIN(0.3));
    if (!RANKS_SLOW) CHECK(after - before < 8192);
    /* all numbers: one that does not exist, unless two strangers' number 1 came first */
    CHECK_IS(shared->result[0], slot > RANKS ? CDDP_TIMEOUT
                                : slot < RANKS || strstr(shared->text[0], "taken twice") != NULL
                                    ? CDDP_INVALID_ARGUMENT
                                    : CDDP_MISMATCH);
    for (k = 1; k < 4; k++) kill(pids[k], SIGKILL);
    ranks_join(pids + 1, 3, 5, status);
  }
}

/* A false root floods a rank with messages that it knows. */
static int flood_rank(int slot, void *arg) {
  static const unsigned char token[sizeof ((cddp__root_search *)0)->proof_salt];
  uint32_t kind = slot == 0 ? CDDP__RENDEZVOUS_WAIT : CDDP__RENDEZVOUS_READY;
  cddp__frame_head h = cddp__frame_head_of(CDDP__FRAME_MESSAGE, kind, CDDP_U8, 0, 0);
  cddp__connection c;
  cddp__address a = cddp__loopback_address();
  int listener, fd;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  cddp__address_set_port(&a, shared->port);
  CHECK_EQ(cddp__listen_address(&a, &listener), 0);
  __atomic_store_n(&shared->serves, test_failures == 0 ? 1 : -1, __ATOMIC_SEQ_CST);
  while (cddp__wait_fd(listener, POLLIN, cddp__now() + 60) == CDDP_OK) {
    if ((fd = cddp__accept(listener)) < 0) continue;
    cddp__connection_begin(&c, NULL, fd, false);
    CHECK_OK(cddp__connection_begin_proof(&c, "", "rendezvous", token, sizeof token));
    while (!cddp__connection_progress(&c) && c.state != CDDP__CONNECTION_ENDED) ranks_sleep(0.001);
    flood(fd, &h, sizeof h);
  }
  return 1;
}

static void test_flood_rank(void) {
  pid_t pids[2];
  int status, slot;
  for (slot = 0; slot < 2; slot++) {
    prepare(false);
    shared->timeout_s = 2;
    pids[1] = ranks_fork(flood_rank, slot, NULL);
    while (__atomic_load_n(&shared->serves, __ATOMIC_SEQ_CST) == 0) ranks_sleep(0.01);
    CHECK_EQ(shared->serves, 1);
    pids[0] = ranks_fork(life, 1, NULL);
    ranks_join(pids, 1, RANKS_WITHIN(20), &status);
    CHECK(shared->result[1] != CDDP_OK && shared->ready[1] > 0);
    CHECK(shared->ready[1] - shared->began[1] < 2 * 1.1 + RANKS_WITHIN(0.3));
    kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
  }
}

/* --- a rank that is there twice: as soon as enough processes have come, all hear of it --- */

static void test_double(void) {
  pid_t pids[RANKS];
  int status[RANKS], i;
  double begin = test_now();
  prepare(false);
  shared->ranks[3] = 1;
  for (i = 0; i < RANKS; i++) pids[i] = ranks_fork(life, i, NULL);
  ranks_join(pids, RANKS, RANKS_WITHIN(20), status);
  CHECK(test_now() - begin < RANKS_WITHIN(3.0));
  for (i = 0; i < RANKS; i++) {
    CHECK_IS(shared->result[i], CDDP_INVALID_ARGUMENT);
    CHECK(strstr(shared->text[i], "rank 1") != NULL);
  }
}

/* --- a text of a false root is shown, and no terminal obeys it --- */

static const char poison[] = "\033]0;owned\007\033[2Jbad\302\233news"
                             "\377\300\200\355\240\200\341\200"
                             "gr\303\274n\342\202\254\360\237\230\200end\303";

/* A false root, in a process of its own. */
static int serve_poison(int rank, void *arg) {
  static const unsigned char token[sizeof ((cddp__root_search *)0)->proof_salt];
  cddp__connection c;
  cddp__address a = cddp__loopback_address();
  int listener, fd;
  (void)rank;
  (void)arg;
  cddp__address_set_port(&a, shared->port);
  CHECK_EQ(cddp__listen_address(&a, &listener), 0);
  __atomic_store_n(&shared->serves, test_failures == 0 ? 1 : -1, __ATOMIC_SEQ_CST);
  while (cddp__wait_fd(listener, POLLIN, cddp__now() + 60) == CDDP_OK) {
    if ((fd = cddp__accept(listener)) < 0) continue;
    cddp__connection_begin(&c, NULL, fd, false);
    CHECK_OK(cddp__connection_begin_proof(&c, "", "rendezvous", token, sizeof token));
    (void)cddp__send_failure(&c, CDDP_TIMEOUT, poison, cddp__now() + 1);
  }
  return 1;
}

static void test_poison(void) {
  double deadline = test_now() + RANKS_WITHIN(5);
  const char *c;
  int status;
  pid_t pid, server;
  prepare(false);
  server = ranks_fork(serve_poison, 0, NULL);
  while (__atomic_load_n(&shared->serves, __ATOMIC_SEQ_CST) == 0 && test_now() < deadline)
    ranks_sleep(0.01);
  CHECK_EQ(shared->serves, 1);
  pid = ranks_fork(life, 1, NULL);
  ranks_join(&pid, 1, RANKS_WITHIN(20), &status);
  CHECK(shared->result[1] != CDDP_OK);
  CHECK(strstr(shared->text[1], "bad") != NULL && strstr(shared->text[1], "news") != NULL);
  CHECK(strstr(shared->text[1], "gr\303\274n\342\202\254\360\237\230\200end") != NULL);
  CHECK(strstr(shared->text[1], "\\xff\\xc0\\x80\\xed\\xa0\\x80\\xe1\\x80gr") != NULL);
  for (c = shared->text[1]; *c != 0; c++)
    CHECK((unsigned char)*c >= 32 && *c != 127 && (unsigned char)*c != 0x9b &&
          (unsigned char)*c != 0xff);
  kill(server, SIGKILL);
  CHECK_EQ(waitpid(server, NULL, 0), server);
}

/* --- strangers at the port where the root waits for other hosts' ranks --- */

static void strangers_at_the_root(rlim_t files) {
  pid_t pids[RANKS];
  int status[RANKS], fds[150], i, r;
  double begin;
  prepare(false);
  shared->files = files;
  setenv("CDDP_HOST_ID", "a", 1);
  pids[0] = ranks_fork(life, 0, NULL);
  for (i = 0; i < 1000 && (fds[0] = to_port(shared->port)) < 0; i++) ranks_sleep(0.001);
  close(fds[0]);
  for (i = 0; i < 150; i++) {
    fds[i] = to_port(shared->port);
    CHECK(fds[i] >= 0);
    speak(fds[i], i);
  }
  setenv("CDDP_HOST_ID", "b", 1);
  begin = test_now();
  for (i = 1; i < RANKS; i++) pids[i] = ranks_fork(life, i, NULL);
  unsetenv("CDDP_HOST_ID");
  ranks_join(pids, RANKS, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, RANKS));
  for (r = 0; r < RANKS; r++) {
    if (shared->result[r] != CDDP_OK) fprintf(stderr, "  rank %d: %s\n", r, shared->text[r]);
    CHECK(shared->ready[r] - begin < RANKS_WITHIN(1.0));
  }
  for (i = 0; i < 150; i++) close(fds[i]);
}

static void test_root(void) {
  strangers_at_the_root(0);
  strangers_at_the_root(60); /* fewer than strangers that it would put up with */
}

int main(void) {
  struct rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 4096) {
    files.rlim_cur = files.rlim_max < 4096 ? files.rlim_max : 4096;
    setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < 4096) return TEST_SKIP("fewer than 4096 descriptors are allowed");
  }
  shared = (struct shared *)ranks_shared(sizeof *shared);
  RUN(test_start);
  RUN(test_storm);
  RUN(test_no_such_rank);
  RUN(test_no_thread);
  RUN(test_stream);
  RUN(test_half_table);
  RUN(test_damaged_table);
  RUN(test_flood_root);
  RUN(test_flood_rank);
  RUN(test_double);
  RUN(test_dropped);
  RUN(test_root);
  RUN(test_poison);
  return TEST_END();
}
