/* fuzz.c - parsers of bytes from outside, fed with anything.

   tests/fuzz/fuzz.sh 600           runs each target for 10 minutes under libFuzzer (needs clang)
   build/asan/fuzz                  replays tests/fuzz/corpus/TARGET/...; part of ninja test
   build/asan/fuzz TARGET FILE...   replays these files

   Works as follows: the implementation is included with every system call that its parsers make
   replaced by a function over memory: a run needs no socket, no file, no clock and no luck, so an
   input always does the same and ten thousand of them take a second. Each target begins with a
   byte of settings and one that says which allocation fails; what follows is a script of events
   (bytes come, a connection ends, time passes) or the bytes that the other side sends. */
#define _GNU_SOURCE
#include <ifaddrs.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static ssize_t fake_recv(int fd, void *p, size_t n, int flags);
static ssize_t fake_send(int fd, const void *p, size_t n, int flags);
static ssize_t fake_recvmsg(int fd, struct msghdr *m, int flags);
static ssize_t fake_sendmsg(int fd, const struct msghdr *m, int flags);
static int fake_poll(struct pollfd *fds, nfds_t n, int ms);
static int fake_close(int fd);
static int fake_socket(int domain, int type, int protocol);
static int fake_connect(int fd, const struct sockaddr *a, socklen_t n);
static int fake_bind(int fd, const struct sockaddr *a, socklen_t n);
static int fake_listen(int fd, int backlog);
static int fake_shutdown(int fd, int how);
static int fake_getsockname(int fd, struct sockaddr *a, socklen_t *n);
static int fake_setsockopt(int fd, int level, int name, const void *p, socklen_t n);
static int fake_getsockopt(int fd, int level, int name, void *p, socklen_t *n);
static int fake_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
static int fake_clock_gettime(clockid_t clock, struct timespec *t);
static int fake_nanosleep(const struct timespec *t, struct timespec *left);
static long fake_syscall(long number, ...);
static char *fake_getenv(const char *name);
static int fake_open(const char *path, int flags, ...);
static int fake_flock(int fd, int command);
static int fake_ftruncate(int fd, off_t size);
static int fake_unlink(const char *path);
static ssize_t fake_pread(int fd, void *p, size_t n, off_t at);
static ssize_t fake_pwrite(int fd, const void *p, size_t n, off_t at);
static int fake_fstat(int fd, struct stat *st);
static void *fake_calloc(size_t n, size_t size);

#define FIRST_FD 1000 /* below it: real ones */

/* The header's own names that are spelled so, parameters and fields, change with them. */
#define recv fake_recv
#define send fake_send
#define recvmsg fake_recvmsg
#define sendmsg fake_sendmsg
#define poll fake_poll
#define close fake_close
#define socket fake_socket
#define connect fake_connect
#define bind fake_bind
#define listen fake_listen
#define shutdown fake_shutdown
#define getsockname fake_getsockname
#define setsockopt fake_setsockopt
#define getsockopt fake_getsockopt
#define epoll_ctl fake_epoll_ctl
#define clock_gettime fake_clock_gettime
#define nanosleep fake_nanosleep
#define syscall fake_syscall
#define getenv fake_getenv
#define open fake_open
#define flock(fd, how) fake_flock(fd, how) /* not the struct */
#define ftruncate fake_ftruncate
#define unlink fake_unlink
#define pread fake_pread
#define pwrite fake_pwrite
#define calloc fake_calloc
static bool few_descriptors; /* the limit is reached; else there is none */
#define getrlimit(which, limit) (memset(limit, 0, sizeof *(limit)), few_descriptors ? 0 : -1)
#define getifaddrs(list) (-1)
#define fstat(fd, st) fake_fstat(fd, st)
#define lstat(path, st) ((void)(path), fake_fstat(FIRST_FD, st))
#define stat(path, st) ((void)(path), fake_fstat(FIRST_FD, st))

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#undef close
#undef open
#undef getenv
#undef calloc
#undef stat
#undef clock_gettime
#undef nanosleep

#include "../test.h"

/* --- the input ------------------------------------------------------------------------------ */

typedef struct input {
  const unsigned char *p;
  size_t n;
} input;

static unsigned take(input *in) { /* 0 when there is no more */
  if (in->n == 0) return 0;
  in->n--;
  return *in->p++;
}

static input take_bytes(input *in, size_t n) {
  input part;
  part.p = in->p;
  part.n = n < in->n ? n : in->n;
  in->p += part.n;
  in->n -= part.n;
  return part;
}

/* A count: one byte, or three after 255. */
static size_t take_size(input *in) {
  size_t n = take(in);
  if (n < 255) return n;
  n = take(in);
  return n << 8 | take(in);
}

/* --- the world of a run --------------------------------------------------------------------- */

#define FDS 64

typedef struct fake_fd {
  bool open, ended, blocked; /* ended: by the other side; blocked: takes no output */
  bool local;                /* a Unix socket */
  input in;                  /* what it has to say now */
  unsigned char extra[256];  /* comes before in */
  size_t extra_size, extra_at;
} fake_fd;

static struct world {
  fake_fd fds[FDS];
  double now;
  int allocations, fail_at, balance;
  size_t bytes;
  bool tiny;                          /* one byte a call, EINTR now and then */
  unsigned calls;
  uint64_t dice;
  input script;                       /* what poll does, in the meeting */
  input stream;                       /* what the server says, in the client */
  bool silent;                        /* at its end: silence instead of a closed connection */
  bool honest;                        /* the server knows the secret */
  const void *called;                 /* not NULL: its challenge has begun */
  int store;                          /* the meeting's store: a descriptor, or 0 */
  bool refuses;                       /* connect fails */
  bool others;                        /* somebody else has the store file open */
  bool stranger;                      /* the peer is another user */
  unsigned char *file;
  size_t file_size, file_capacity;
  struct cddp__rendezvous *meeting;
  int coming;                         /* connections that wait to be accepted */
  int called_at;                      /* the meeting: at this listener; 0: at any */
  const char *names[16];              /* environment */
  char *values[16];
  int variables;
} w;

#define REQUIRE(c)                                                     \
  do {                                                                 \
    if (!(c)) {                                                        \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #c); \
      abort();                                                         \
    }                                                                  \
  } while (0)

static void *world_alloc(size_t bytes, void *user_data) {
  size_t *p;
  (void)user_data;
  if (++w.allocations == w.fail_at || w.bytes + bytes > 24u << 20) return NULL;
  p = (size_t *)malloc(bytes + 16);
  if (p == NULL) return NULL;
  p[0] = bytes;
  w.bytes += bytes;
  w.balance++;
  return p + 2;
}

static void world_free(void *p, void *user_data) {
  (void)user_data;
  w.balance--;
  w.bytes -= ((size_t *)p)[-2];
  free((size_t *)p - 2);
}

static void *fake_calloc(size_t n, size_t size) { /* of what is not for the allocator */
  return ++w.allocations == w.fail_at ? NULL : calloc(n, size);
}

static cddp_allocator world_allocator(void) {
  cddp_allocator a;
  a.alloc = world_alloc;
  a.free = world_free;
  a.user_data = NULL;
  return a;
}

static void world_begin(input *in) {
  unsigned char *file = w.file;
  size_t capacity = w.file_capacity;
  memset(&w, 0, sizeof w);
  w.file = file;
  w.file_capacity = capacity;
  w.now = 1000;
  w.fail_at = (int)take(in);
}

static void world_end(void) {
  int i;
  REQUIRE(w.balance == 0);
  for (i = 0; i < FDS; i++) REQUIRE(!w.fds[i].open);
}

static int world_fd(void) {
  int i;
  for (i = 1; i < FDS && w.fds[i].open; i++) continue;
  if (i == FDS) {
    errno = EMFILE;
    return -1;
  }
  memset(&w.fds[i], 0, sizeof w.fds[i]);
  w.fds[i].open = true;
  return FIRST_FD + i;
}

static fake_fd *fd_of(int fd) {
  REQUIRE(fd >= FIRST_FD && fd < FIRST_FD + FDS && w.fds[fd - FIRST_FD].open);
  return &w.fds[fd - FIRST_FD];
}

/* Whether the call is to be interrupted; else cuts *n. */
static bool interrupted(size_t *n) {
  w.calls++;
  if (!w.tiny) return false;
  if (w.calls % 7 == 3) {
    errno = EINTR;
    return true;
  }
  if (*n > 1) *n = 1 + w.calls % 3 % *n;
  return false;
}

static size_t fd_ready(const fake_fd *f) {
  return f->extra_size - f->extra_at + f->in.n;
}

static ssize_t fake_recv(int fd, void *p, size_t n, int flags) {
  fake_fd *f = fd_of(fd);
  unsigned char *to = (unsigned char *)p;
  size_t i;
  (void)flags;
  if (interrupted(&n)) return -1;
  for (i = 0; i < n && fd_ready(f) > 0; i++)
    to[i] = f->extra_at < f->extra_size ? f->extra[f->extra_at++] : (unsigned char)take(&f->in);
  if (i > 0 || n == 0 || f->ended) return (ssize_t)i;
  errno = EAGAIN;
  return -1;
}

static void client_said(fake_fd *f, const unsigned char *p, size_t n);
static void store_asked(fake_fd *f, const unsigned char *p, size_t n);

static ssize_t fake_send(int fd, const void *p, size_t n, int flags) {
  fake_fd *f = fd_of(fd);
  (void)flags;
  if (f->blocked) {
    errno = EAGAIN;
    return -1;
  }
  if (fd == w.store) {
    store_asked(f, (const unsigned char *)p, n);
    return (ssize_t)n;
  }
  if (w.honest) { /* the handshake comes in whole pieces */
    client_said(f, (const unsigned char *)p, n);
    return (ssize_t)n;
  }
  return interrupted(&n) ? -1 : (ssize_t)n;
}

static ssize_t fake_recvmsg(int fd, struct msghdr *m, int flags) {
  ssize_t n = fake_recv(fd, m->msg_iov[0].iov_base, m->msg_iov[0].iov_len, flags);
  struct cmsghdr *head = (struct cmsghdr *)m->msg_control;
  int sent;
  if (n > 0 && head != NULL && m->msg_controllen >= CMSG_LEN(sizeof sent) &&
      w.calls % 2 == 1 && (sent = world_fd()) >= 0) { /* a descriptor came along */
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof sent);
    memcpy(CMSG_DATA(head), &sent, sizeof sent);
    m->msg_controllen = CMSG_LEN(sizeof sent);
  } else {
    m->msg_controllen = 0;
  }
  return n;
}

static ssize_t fake_sendmsg(int fd, const struct msghdr *m, int flags) {
  return fake_send(fd, m->msg_iov[0].iov_base, m->msg_iov[0].iov_len, flags);
}

static int fake_close(int fd) {
  if (fd < FIRST_FD) return close(fd);
  if (fd == w.store) w.store = 0;
  fd_of(fd)->open = false;
  return 0;
}

static int fake_socket(int domain, int type, int protocol) {
  (void)domain, (void)type, (void)protocol;
  return world_fd();
}

static int fake_connect(int fd, const struct sockaddr *a, socklen_t n) {
  fake_fd *f = fd_of(fd);
  (void)a, (void)n;
  if (w.refuses) {
    errno = ECONNREFUSED;
    return -1;
  }
  f->in = w.stream; /* one after the other: what the first did not take is the next one's */
  f->ended = !w.silent;
  return 0;
}

static int fake_bind(int fd, const struct sockaddr *a, socklen_t n) {
  (void)fd, (void)a, (void)n;
  errno = EACCES;
  return w.meeting != NULL ? 0 : -1; /* a run has no second thread: the file's server stays away */
}
static int fake_listen(int fd, int backlog) {
  (void)fd, (void)backlog;
  return 0;
}
static int fake_shutdown(int fd, int how) {
  (void)fd_of(fd), (void)how;
  return 0;
}
static int fake_getsockname(int fd, struct sockaddr *a, socklen_t *n) {
  struct sockaddr_in *in = (struct sockaddr_in *)(void *)a;
  if (w.meeting == NULL) return -1;
  memset(a, 0, *n = sizeof *in);
  in->sin_family = fd_of(fd)->local ? AF_UNIX : AF_INET;
  in->sin_port = htons(1234);
  return 0;
}
static int fake_setsockopt(int fd, int level, int name, const void *p, socklen_t n) {
  (void)fd_of(fd), (void)level, (void)name, (void)p, (void)n;
  return 0;
}

static int fake_getsockopt(int fd, int level, int name, void *p, socklen_t *n) {
  memset(p, 0, *n);
  if (level == SOL_SOCKET && name == SO_PEERCRED) {
    uint32_t c[3] = {(uint32_t)fd, (uint32_t)geteuid() + (w.stranger ? 1u : 0u), 0};
    memcpy(p, c, sizeof c);
  }
  return 0;
}

static int fake_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event) {
  (void)epoll, (void)op, (void)event;
  if (fd >= FIRST_FD) (void)fd_of(fd); /* else an eventfd */
  return 0;
}

static int fake_clock_gettime(clockid_t clock, struct timespec *t) {
  (void)clock;
  t->tv_sec = (time_t)w.now;
  t->tv_nsec = (long)((w.now - (double)t->tv_sec) * 1e9);
  return 0;
}

static int fake_nanosleep(const struct timespec *t, struct timespec *left) {
  (void)left;
  w.now += (double)t->tv_sec + 1e-9 * (double)t->tv_nsec + 1e-6;
  return 0;
}

static long fake_accept(int listener);

static long fake_syscall(long number, ...) {
  va_list args;
  unsigned char *p;
  size_t n, i;
  va_start(args, number);
  p = va_arg(args, unsigned char *);
  n = va_arg(args, size_t);
  va_end(args);
  if (number == SYS_accept4) return fake_accept((int)(uintptr_t)p);
  if (number == SYS_memfd_create) return world_fd();
  if (number == SYS_futex) return 0;
  if (number == SYS_sched_getaffinity) return 0;
  REQUIRE(number == SYS_getrandom);
  for (i = 0; i < n; i++) {
    w.dice = w.dice * 6364136223846793005u + 1442695040888963407u;
    p[i] = (unsigned char)(w.dice >> 40);
  }
  return (long)n;
}

static char *fake_getenv(const char *name) {
  int i;
  for (i = 0; i < w.variables; i++)
    if (strcmp(w.names[i], name) == 0) return w.values[i];
  return NULL;
}

static bool next_event(struct pollfd *fds, nfds_t n);

static int fake_poll(struct pollfd *fds, nfds_t n, int ms) {
  int ready = 0;
  bool events;
  nfds_t i;
  w.calls++;
  if (w.tiny && w.calls % 5 == 2) {
    errno = EINTR;
    return -1;
  }
  events = w.meeting != NULL && w.meeting->node_socket >= 0 && n > 1;
  if (events && !next_event(fds, n) && w.now < w.meeting->deadline) w.now = w.meeting->deadline;
  for (i = 0; i < n; i++) {
    const fake_fd *f = fds[i].fd >= FIRST_FD ? fd_of(fds[i].fd) : NULL;
    if (!events) fds[i].revents = 0;
    if (f == NULL) continue;
    if ((fds[i].events & POLLIN) && (fd_ready(f) > 0 || f->ended)) fds[i].revents |= POLLIN;
    if ((fds[i].events & POLLOUT) && !f->blocked) fds[i].revents |= POLLOUT;
    if (fds[i].revents != 0) ready++;
  }
  if (ready == 0) w.now += ms > 0 ? ms * 1e-3 : 1e-5;
  return ready;
}

/* --- store-server: the connections' state machine, the commands, the challenge ---------------- */

#define CONNS 6

static cddp__client *open_conn(cddp__server *v) {
  const cddp__client *before = v->clients;
  int fd = world_fd();
  if (fd < 0) return NULL;
  cddp__server_add_client(v, fd, cddp__has_spare_fd(fd));
  return v->clients != before ? v->clients : NULL;
}

/* What epoll would report, as long as there is something. */
static void serve_conn(cddp__server *v, cddp__client *c) {
  int rounds;
  for (rounds = 0; rounds < 4096 && c->connection.fd >= 0; rounds++) {
    const fake_fd *f = fd_of(c->connection.fd);
    uint32_t events = 0;
    if ((c->events & EPOLLIN) && (fd_ready(f) > 0 || f->ended)) events |= EPOLLIN;
    if ((c->events & EPOLLOUT) && !f->blocked) events |= EPOLLOUT;
    if (events == 0) break;
    cddp__client_event(v, c, events);
  }
  REQUIRE(rounds < 4096);
}

/* The proof that the server wants to see. */
static void prove(const cddp__server *v, cddp__client *c) {
  fake_fd *f = fd_of(c->connection.fd);
  if (v->secret == NULL) return;
  memcpy(f->extra, CDDP__AUTH_PROOF, 8);
  cddp__challenge_prove(&c->connection.challenge, true, f->extra + 8);
  f->extra_size = 8 + CDDP__PROOF_SIZE;
  f->extra_at = 0;
}

static void server_check(cddp__server *v) {
  size_t bytes = 0, keys = 0, i;
  int blocked = 0;
  const cddp__entry *e;
  const cddp__client *c;
  for (c = v->clients; c != NULL; c = c->next) {
    bytes += c->connection.in.capacity + c->connection.out.capacity;
    blocked += c->blocked;
    REQUIRE(!c->blocked || (c->connection.fd >= 0 && c->parser.code == CDDP__STORE_WAIT));
  }
  for (i = 0; i < CDDP__MAP_CHAINS; i++)
    for (e = v->chains[i]; e != NULL; e = e->next)
      keys += sizeof *e + e->key_size + e->value.capacity;
  REQUIRE(bytes == v->buffered && keys == v->stored && blocked == v->waiting);
}

static void server_event(cddp__server *v, cddp__client **conns, input *in) {
  unsigned op = take(in), k = op % CONNS;
  cddp__client *c = conns[k];
  if (c == NULL) c = conns[k] = open_conn(v);
  if (c == NULL) return;
  switch (op / CONNS % 8) {
  case 4:
    prove(v, c);
    break;
  case 5:
    fd_of(c->connection.fd)->ended = true;
    break;
  case 6:
    w.now += (double)take(in) / 8;
    break;
  case 7:
    fd_of(c->connection.fd)->blocked = !fd_of(c->connection.fd)->blocked;
    break;
  default:
    fd_of(c->connection.fd)->in = take_bytes(in, take_size(in));
  }
  if (c->connection.fd >= 0) serve_conn(v, c);
  server_check(v);
  cddp__server_settle(v);
  server_check(v);
  for (k = 0; k < CONNS; k++) { /* those that ended are gone */
    for (c = v->clients; c != NULL && c != conns[k]; c = c->next) continue;
    conns[k] = c;
  }
}

static void target_store_server(input *in) {
  unsigned settings = take(in);
  cddp__client *conns[CONNS];
  cddp__server *v;
  cddp_allocator a = world_allocator();
  int events;
  world_begin(in);
  w.tiny = settings & 2;
  memset(conns, 0, sizeof conns);
  v = (cddp__server *)cddp__calloc(&a, 1, sizeof *v);
  if (v == NULL) return;
  v->allocator = a;
  v->secret = settings & 1 ? "secret" : NULL;
  v->epoll = -1;
  for (events = 0; in->n > 0 && events < 400; events++) server_event(v, conns, in);
  cddp__server_free(v);
  world_end();
}

/* --- store-client: what a server answers, and the challenge ----------------------------------- */

/* An honest server's side of the handshake. */
static void client_said(fake_fd *f, const unsigned char *p, size_t n) {
  static cddp__challenge called;
  if (n == 8 + CDDP__NONCE_SIZE && memcmp(p, CDDP__AUTH_HELLO, 8) == 0) {
    w.called = p;
    (void)cddp__challenge_begin(&called, "secret", "store", false, NULL, 0);
  } else if (n != 8 + CDDP__PROOF_SIZE || w.called == NULL) {
    return;
  }
  cddp__challenge_feed(&called, p, n);
  memcpy(f->extra, called.out, called.out_size);
  f->extra_size = called.out_size;
  f->extra_at = 0;
}

/* Results are in range and failures say something. */
static void must_say(cddp_result r) {
  REQUIRE((unsigned)r < CDDP__RESULT_COUNT);
  if (r != CDDP_OK && cddp_error()[0] == 0) fprintf(stderr, "no text: %s\n", cddp_result_name(r));
  if (r != CDDP_OK) REQUIRE(cddp_error()[0] != 0 && strlen(cddp_error()) < CDDP__ERROR_MAX);
}

static void store_op(cddp_store *s, unsigned op) {
  static const char *const keys[] = {"a", "b", "counter", ""};
  const char *key = keys[op / 8 % 4];
  unsigned char value[64];
  size_t size = 0;
  int64_t number = 0;
  bool flag = false;
  cddp_result r;
  switch (op % 8) {
  case 0: r = cddp_store_set(s, key, "a value", op / 32); break;
  case 1:
    r = cddp_store_get(s, key, value, sizeof value, &size);
    if (r == CDDP_OK) REQUIRE(size <= sizeof value);
    break;
  case 2: r = cddp_store_add(s, key, 7, &number); break;
  case 3:
    r = cddp_store_compare_set(s, key, "1", op / 32 % 2, "new", 3, value, sizeof value, &size,
                               &flag);
    if (r == CDDP_OK) REQUIRE(size <= sizeof value);
    break;
  case 4: r = cddp_store_wait(s, keys, 1 + (int)(op / 32 % 4), 0.5); break;
  case 5: r = cddp_store_check(s, keys, (int)(op / 32 % 4), &flag); break;
  case 6: r = cddp_store_delete(s, key, &flag); break;
  default: r = cddp_store_num_keys(s, &number);
  }
  must_say(r);
}

static cddp_result open_store(cddp_store **s, const char *method, const char *secret) {
  cddp__store_options o;
  memset(&o, 0, sizeof o);
  o.desc.init_method = method;
  o.deadline = w.now + 3;
  o.desc.timeout_s = 3;
  o.desc.secret = secret;
  o.elect = true;
  o.desc.allocator = world_allocator();
  return cddp__store_open(s, &o);
}

static void target_store_client(input *in) {
  unsigned settings = take(in);
  cddp_store *s = NULL;
  input ops;
  cddp_result r;
  world_begin(in);
  w.honest = (settings & 3) == 3;
  w.tiny = (settings & 4) && !w.honest;
  w.silent = settings & 8;
  ops = take_bytes(in, settings >> 5);
  w.stream = *in;
  r = open_store(&s, "tcp://127.0.0.1:29500", settings & 1 ? "secret" : NULL);
  must_say(r);
  while (r == CDDP_OK && ops.n > 0) {
    if (s->connection.fd >= 0) w.stream = fd_of(s->connection.fd)->in;
    store_op(s, take(&ops));
  }
  cddp__store_close(s);
  world_end();
}

/* --- file: a store file that somebody has written, and what answers where it leads ------------ */

static void file_resize(size_t n) {
  if (n > w.file_capacity) {
    w.file_capacity = 2 * n;
    w.file = (unsigned char *)realloc(w.file, w.file_capacity);
    REQUIRE(w.file != NULL);
  }
  if (n > w.file_size) memset(w.file + w.file_size, 0, n - w.file_size);
  w.file_size = n;
}

static int fake_open(const char *path, int flags, ...) {
  (void)path, (void)flags;
  return world_fd();
}

static int fake_flock(int fd, int command) {
  (void)fd_of(fd), (void)command;
  errno = EWOULDBLOCK;
  return w.others ? -1 : 0;
}

static int fake_ftruncate(int fd, off_t size) {
  (void)fd_of(fd);
  if (size <= 1 << 20) file_resize((size_t)size); /* the meeting's memory is all holes */
  return 0;
}

static int fake_unlink(const char *path) {
  (void)path;
  return 0;
}

static ssize_t fake_pread(int fd, void *p, size_t n, off_t at) {
  (void)fd_of(fd);
  if (interrupted(&n)) return -1;
  REQUIRE(at >= 0);
  if ((size_t)at >= w.file_size) return 0;
  n = n < w.file_size - (size_t)at ? n : w.file_size - (size_t)at;
  memcpy(p, w.file + at, n);
  return (ssize_t)n;
}

static ssize_t fake_pwrite(int fd, const void *p, size_t n, off_t at) {
  (void)fd_of(fd);
  if (interrupted(&n)) return -1;
  if (at < 0 || (size_t)at + n > 1u << 20) {
    errno = ENOSPC;
    return -1;
  }
  if ((size_t)at + n > w.file_size) file_resize((size_t)at + n);
  memcpy(w.file + at, p, n);
  return (ssize_t)n;
}

static int fake_fstat(int fd, struct stat *st) {
  memset(st, 0, sizeof *st);
  if (fd < 0) return errno = EBADF, -1;
  if (fd != FIRST_FD) (void)fd_of(fd); /* that one is the path */
  st->st_mode = S_IFREG | 0600;
  st->st_uid = geteuid();
  st->st_nlink = 1;
  st->st_size = (off_t)w.file_size;
  return 0;
}

static void target_file(input *in) {
  unsigned settings = take(in);
  cddp_store *s = NULL;
  uint32_t count;
  size_t n, head = offsetof(cddp__store_file, addresses);
  input ops, file;
  cddp_result r;
  world_begin(in);
  w.honest = (settings & 1) && !(settings & 2);
  w.tiny = settings & 2;
  w.others = !(settings & 4);
  w.refuses = settings & 8;
  ops = take_bytes(in, settings >> 4);
  file = take_bytes(in, take_size(in));
  w.stream = *in;
  file_resize(0);
  if (settings & 1) { /* a whole record of 0 to 3 addresses, which the file's bytes are */
    count = take(&file) % 4;
    file_resize(sizeof(cddp__store_file));
    memcpy(w.file, CDDP__FILE_MAGIC, sizeof CDDP__FILE_MAGIC);
    memcpy(w.file + offsetof(cddp__store_file, count), &count, sizeof count);
    n = file.n < w.file_size - head ? file.n : w.file_size - head;
    if (n > 0) memcpy(w.file + head, file.p, n);
  } else {
    file_resize(file.n);
    if (file.n > 0) memcpy(w.file, file.p, file.n);
  }
  r = open_store(&s, "file:///f", NULL);
  must_say(r);
  while (r == CDDP_OK && ops.n > 0) {
    if (s->connection.fd >= 0) w.stream = fd_of(s->connection.fd)->in;
    store_op(s, take(&ops));
  }
  cddp__store_close(s);
  world_end();
}

/* --- meeting: what ranks tell a coordinator, what the store does, and what its clients hear --- */

static int last_client;

static long fake_accept(int listener) {
  unsigned kind;
  int fd;
  if (w.coming <= 0 || (w.called_at != 0 && w.called_at != listener)) {
    errno = EAGAIN;
    return -1;
  }
  w.coming--;
  fd = world_fd();
  kind = take(&w.script);
  w.stranger = kind == 7;
  if (fd >= 0) fd_of(last_client = fd)->local = kind % 4 != 0;
  return fd;
}

/* A message that is right but for its rank and world size, or another kind of message. */
static void say_rank(fake_fd *f) {
  unsigned rank = take(&w.script), size = take(&w.script);
  size_t i;
  uint32_t kind = size / 16 == 14   ? CDDP__RENDEZVOUS_READY
                  : size / 16 == 13 ? CDDP__FAILED + rank
                                    : CDDP__RENDEZVOUS_RANK;
  size_t bytes = kind == CDDP__RENDEZVOUS_READY ? 0 : sizeof(cddp__rank_info);
  cddp__frame_head head = cddp__frame_head_of(CDDP__FRAME_MESSAGE, kind, CDDP_U8, bytes, bytes);
  cddp__rank_info info = w.meeting->registered[0].info;
  for (i = 0; i < w.meeting->child_count; i++) { /* a process of another host knows the secret */
    cddp__connection *c = &w.meeting->children[i].connection;
    if (c->state == CDDP__CONNECTION_PROVING && fd_of(c->fd) == f) c->state = CDDP__CONNECTION_UP;
  }
  info.rank = rank == 255 ? UINT32_MAX : rank;
  if (size % 16 != 0) info.world_size = size % 16;
  if (size / 16 == 15) info.user++;
  memcpy(f->extra, &head, sizeof head);
  memcpy(f->extra + sizeof head, &info, sizeof info);
  f->extra_size = sizeof head + bytes;
  f->extra_at = 0;
}

/* poll in the coordinator's loop, where after its connections come the one to the root, the socket
   of claims, the node's and the root's: the next thing that happens; false when nothing does any
   more. */
static bool next_event(struct pollfd *fds, nfds_t n) {
  unsigned op = take(&w.script);
  nfds_t i, k = op / 8 % 8, roots = w.meeting->net == NULL ? (nfds_t)w.meeting->root.fd_count : 0;
  fake_fd *f = NULL;
  for (i = 0; i < n; i++) fds[i].revents = 0;
  for (i = 0; i + 3 + roots < n && f == NULL; i++) /* the k-th connection */
    if (k-- == 0 || fds[i].fd == last_client) f = fd_of(fds[i].fd);
  switch (op % 8) {
  case 0: return w.script.n > 0;
  case 1:
  case 2:
    i = n - 1 - (op % 8 == 1 ? roots : 0);
    fds[i].revents = POLLIN;
    w.called_at = fds[i].fd;
    w.coming = 1;
    break;
  case 3:
  case 4:
    if (f != NULL) say_rank(f);
    break;
  case 5:
    if (f != NULL) f->in = take_bytes(&w.script, take_size(&w.script));
    break;
  case 6:
    if (f != NULL) f->ended = true;
    break;
  default: w.now += (double)take(&w.script) / 4;
  }
  return w.script.n > 0;
}

/* The meeting's store answers as the script has it. */
static void store_asked(fake_fd *f, const unsigned char *p, size_t n) {
  unsigned kind, code = n > 0 ? p[0] : (unsigned)CDDP__STORE_GETNUMKEYS;
  cddp__span desired = cddp__span_of(NULL, 0);
  uint64_t answer = 0;
  size_t size = 8;
  bool string = code == CDDP__STORE_GET;
  if (code == CDDP__STORE_CHECK || code == CDDP__STORE_WAIT || code == CDDP__STORE_CANCEL_WAIT)
    size = 1;
  if (code == CDDP__STORE_CHECK) answer = take(&w.script) != 255;
  if (code == CDDP__STORE_ADD) answer = 1 + take(&w.script) / 128;
  if (code == CDDP__STORE_DELETE_KEY) answer = 1;
  if (code == CDDP__STORE_COMPARE_SET) {
    const unsigned char *at = p + 1;
    kind = take(&w.script);
    w.refuses = kind == 3;
    w.now += 0.25;
    string = kind % 4 != 0;
    (void)cddp__parse_string(&at), (void)cddp__parse_string(&at);
    desired = cddp__parse_string(&at);
    if (!string) answer = desired.size;
  }
  f->in = string ? take_bytes(&w.script, take_size(&w.script)) : take_bytes(&w.script, 0);
  if (string) answer = f->in.n;
  cddp__put64(f->extra, answer);
  if (!string && desired.size > 0) {
    REQUIRE(desired.size <= sizeof f->extra - 8);
    memcpy(f->extra + 8, desired.data, desired.size);
    size += desired.size;
  }
  f->extra_size = size;
  f->extra_at = 0;
}

static void target_meeting(input *in) {
  unsigned settings = take(in);
  cddp_allocator a = world_allocator();
  cddp__rendezvous m;
  cddp__config at;
  cddp_group *g = NULL;
  cddp_result r;
  int fd;
  world_begin(in);
  memset(&at, 0, sizeof at);
  at.secret = "";
  snprintf(at.backend, sizeof at.backend, "cpu");
  at.world_size = 2 + (int)(settings % 4);
  at.rank = (int)(settings / 4 % 4) % at.world_size;
  at.timeout_s = 20;
  snprintf(at.init_method, sizeof at.init_method, "tcp://127.0.0.1:29500");
  snprintf(at.host, sizeof at.host, "127.0.0.1");
  at.port = 29500;
  w.tiny = settings & 16;
  w.silent = settings & 32;
  memset(&m, 0, sizeof m);
  m.host = cddp__host_create(&a, NULL, at.world_size, at.rank);
  r = m.host != NULL ? cddp__job_info_create(m.host, &at) : CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK) r = cddp__rendezvous_init(&m, &at, m.host);
  m.root.store = (cddp_store *)cddp__calloc(&a, 1, sizeof *m.root.store);
  if (m.host != NULL && m.host->job_info != NULL && m.root.store != NULL) {
    at.client_only = true; /* a launcher serves the store */
    m.root.store->allocator = a;
    m.root.store->timeout_s = 20;
    m.root.store->name = cddp__strdup(&a, "store");
    m.root.store->file = -1;
    cddp__connection_begin(&m.root.store->connection, &m.root.store->allocator, world_fd(), true);
    w.store = m.root.store->connection.fd;
    pthread_mutex_init(&m.root.store->lock, NULL);
    w.meeting = &m;
    w.script = *in;
    if (settings & 64) { /* what a client hears */
      fd = world_fd();
      fd_of(fd)->in = *in;
      fd_of(fd)->ended = !w.silent;
      cddp__channel_init(&m, &m.parent, fd, true, true);
    } else {
      m.node_socket = world_fd();
    }
    if (r == CDDP_OK) r = cddp__collect_ranks(&m);
    if (r == CDDP_OK) cddp__host_set_ranks(m.host, m.net);
    if (r == CDDP_OK && m.memory_fd >= 0) {
      cddp__take_memfd(m.host, m.memory_fd, m.host->size);
      m.memory_fd = -1;
    } else if (r == CDDP_OK && m.host->size > 1) {
      r = cddp__create_memfd(m.host, 0);
    }
    if (r == CDDP_OK) r = cddp__world_group(&g, m.host, &at);
    if (r == CDDP_OK) r = cddp__send_table(&m);
    if (r == CDDP_OK) r = cddp__await_ready(&m);
    must_say(r);
    (void)cddp__rendezvous_end(&m, g, r);
    if (g != NULL) cddp__group_leave(g);
  } else {
    if (m.host != NULL && m.host->job_info != NULL) cddp__free(&a, m.registered);
    cddp__free(&a, m.root.store);
    m.root.store = NULL;
  }
  cddp__host_release(m.host);
  w.meeting = NULL;
  world_end();
}

/* --- link: whoever calls a rank's port; messages of ranks of other hosts --------- */

enum { LINK_RANKS = 4, LINK_RECVS = 8 }; /* rank 0 is this one, the others are on another host */

typedef struct link_world {
  cddp_group *g;
  cddp_work recvs[LINK_RECVS];
  unsigned char bufs[LINK_RECVS][2048];
  int posted;
} link_world;

static cddp__host *link_host(const cddp_allocator *a, bool secret) {
  cddp__host *h = cddp__host_create(a, NULL, LINK_RANKS, 0);
  cddp__net *n = h != NULL ? cddp__net_new(a, LINK_RANKS, 2) : NULL;
  int i;
  if (h != NULL) h->net = n;
  if (n == NULL) return h;
  memset(n->token, 7, 16);
  for (i = 0; i < 2; i++) n->hosts[i].address.sin6_family = AF_INET;
  for (i = 1; i < LINK_RANKS; i++) n->ranks[i].host = 1, n->ranks[i].index = i - 1;
  n->listener = world_fd();
  if (secret) n->secret = cddp__strdup(a, "secret");
  h->size = 1;
  return h;
}

/* The k-th open connection that this rank did not make; NULL: none. */
static fake_fd *link_fd(const cddp__net *n, unsigned k) {
  int i;
  for (i = 1; i < FDS; i++)
    if (w.fds[i].open && FIRST_FD + i != n->listener && k-- == 0) return &w.fds[i];
  return NULL;
}

/* What a rank of the job says, right but for what the script chooses. */
static void link_say(cddp__net *n, fake_fd *f, unsigned kind, input *in) {
  unsigned char *at = f->extra;
  cddp__connection l;
  cddp__frame_head head;
  unsigned dtype;
  memset(&l, 0, sizeof l);
  f->extra_at = 0;
  if (kind == 0) { /* hello */
    int me = n->rank;
    int purpose = (int)(take(in) % 3);
    n->rank = (int)(take(in) % 5);
    cddp__link_write_hello(n, &l, purpose, 0);
    n->rank = me;
    memcpy(at, &l.hello, sizeof l.hello);
    f->extra_size = sizeof l.hello;
  } else if (kind == 1) { /* a message of send */
    dtype = take(in) % 9;
    f->in = take_bytes(in, take_size(in));
    head = cddp__frame_head_of(CDDP__FRAME_MESSAGE, take(in) % 4, (int)dtype,
                           f->in.n / cddp__max(1, cddp_dtype_size((cddp_dtype)dtype)), f->in.n);
  } else { /* a frame of a collective, or another one */
    f->in = take_bytes(in, take_size(in));
    int type = 1 + (int)(take(in) % 5);
    head = cddp__frame_head_of(type, take(in) % 2, CDDP_U8, f->in.n, f->in.n);
  }
  if (kind == 0) return;
  memcpy(at, &head, sizeof head);
  f->extra_size = sizeof head;
}

/* Receives what a collective would: headers, or (odd sizes) a piece. */
static void link_pull(cddp_group *g, size_t size) {
  unsigned char buf[256];
  cddp_result r = CDDP_OK;
  bool moved = false;
  int p;
  cddp__claim_links(g);
  for (p = 0; p < g->size; p++) {
    if (g->hosts->peers[p].link[0] == NULL) continue;
    REQUIRE(g->hosts->net->secret == NULL); /* nobody here knows it */
    cddp__post_frame(g, size % 2 ? CDDP__FRAME_PIECE : CDDP__FRAME_HEADERS, false, p, buf, size);
  }
  (void)cddp__move_frames(g, LONG_MAX, &moved, &r);
  REQUIRE(r == CDDP_OK);
  g->hosts->posted_count = 0;
}

static void link_recv(link_world *k, input *in) {
  cddp_work *q = &k->recvs[k->posted % LINK_RECVS];
  void *buf = k->bufs[k->posted % LINK_RECVS];
  unsigned peer, tag, dtype;
  if (k->posted == LINK_RECVS) return;
  peer = take(in);
  tag = take(in) % 4;
  dtype = take(in) % 8;
  q->call = cddp__make_call(CDDP__KIND_RECV, buf, buf, take(in), (cddp_dtype)dtype, CDDP_SUM,
                            peer < 192 ? 1 + (int)(peer % (LINK_RANKS - 1)) : CDDP_ANY);
  q->call.tag = (int)tag;
  q->group = k->g;
  k->posted++;
  cddp__post_recv(k->g, q);
}

/* The connections to this rank that are up, as no stranger's is, or that are not. */
static int callers(const cddp__net *n, bool up) {
  const cddp__connection *l;
  int count = 0;
  for (l = n->incoming; l != NULL; l = l->next)
    count += (l->state == CDDP__CONNECTION_UP && l->hello.purpose == CDDP__LINK_FRAMES) == up;
  return count;
}

static void link_event(link_world *k, input *in) {
  cddp__net *n = k->g->hosts->net;
  unsigned op = take(in);
  fake_fd *f = link_fd(n, op / 10 % 8);
  switch (op % 10) {
  case 0: w.coming++; break;
  case 1:
  case 2:
  case 3:
    if (f != NULL && f->in.n == 0 && f->extra_at == f->extra_size) link_say(n, f, op % 10 - 1, in);
    break;
  case 4:
    if (f != NULL) f->in = take_bytes(in, take_size(in));
    break;
  case 5:
    if (f != NULL) f->ended = true;
    break;
  case 6: w.now += (double)take(in) / 16; break;
  case 7: link_pull(k->g, take(in)); break;
  case 8: link_recv(k, in); break;
  default: cddp__serve_all_recvs(k->g);
  }
  cddp__poll_all_groups(k->g);
  REQUIRE(n->secret == NULL || callers(n, true) == 0);
}

static void target_link(input *in) {
  unsigned settings = take(in);
  cddp_allocator a = world_allocator();
  static link_world k;
  cddp__config at;
  cddp__host *h;
  world_begin(in);
  memset(&k, 0, sizeof k);
  memset(&at, 0, sizeof at);
  at.world_size = LINK_RANKS;
  at.timeout_s = 5;
  w.silent = true;
  h = link_host(&a, settings & 1);
  if (h != NULL && h->net != NULL && (!(settings & 1) || h->net->secret != NULL) &&
      cddp__world_group(&k.g, h, &at) == CDDP_OK) {
    w.tiny = settings & 2;
    while (in->n > 0) link_event(&k, in);
    few_descriptors = !(settings & 4); /* whoever has said nothing is dropped for the next one */
    w.coming = few_descriptors;
    w.now += 6;
    cddp__poll_all_groups(k.g);
    REQUIRE(!few_descriptors || callers(h->net, false) <= 1);
    few_descriptors = false;
    k.g->p2p.recvs = NULL;
  }
  if (k.g != NULL) cddp__group_leave(k.g);
  cddp__host_release(h);
  world_end();
}

/* --- discovery: variables and addresses ------------------------------------------------------- */

static void target_discovery(input *in) {
  static const char *const names[] = {
      "init_method", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
      "MASTER_PORT", "CDDP_TIMEOUT_S", "CDDP_LISTEN_FD", "TORCHELASTIC_RUN_ID",
      "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"};
  static char text[sizeof names / sizeof names[0]][1500];
  char host[256];
  cddp_group_desc d;
  cddp__config at;
  cddp_result r;
  double seconds;
  int i, port = -1;
  world_begin(in);
  for (i = 0; i < (int)(sizeof names / sizeof names[0]); i++) {
    size_t n = 0;
    while (in->n > 0 && in->p[0] != '\n' && n + 1 < sizeof text[i]) text[i][n++] = (char)take(in);
    text[i][n] = 0;
    take(in);
    if (strcmp(text[i], "-") == 0) continue; /* not set */
    w.names[w.variables] = names[i];
    w.values[w.variables++] = text[i];
  }
  memset(&d, 0, sizeof d);
  d.init_method = fake_getenv("init_method");
  must_say(r = cddp__discover(&at, &d));
  if (r == CDDP_OK) {
    REQUIRE(at.world_size >= 1 && at.world_size <= CDDP__MAX_RANKS);
    REQUIRE(at.rank >= 0 && at.rank < at.world_size && at.timeout_s > 0);
    REQUIRE(at.local_world_size >= -1 && at.listen_fd >= -1);
    REQUIRE(strlen(at.init_method) < sizeof at.init_method && strlen(at.run) < sizeof at.run);
  }
  must_say(r = cddp__host_port(text[0], host, &port));
  if (r == CDDP_OK) REQUIRE(port >= 0 && port <= 65535 && host[0] != 0 && strlen(host) < 256);
  must_say(cddp__discover_timeout(0, &seconds));
}

/* --- safetensors: a file's header, and what it says written again ----------------------------- */

static cddp_safetensors *new_file(const cddp_allocator *a, const void *text, size_t n,
                                  uint64_t data_bytes) {
  cddp_safetensors *f = cddp__st_new(a, n);
  if (f == NULL) return NULL;
  if (n > 0) memcpy(f->text, text, n);
  f->data_bytes = data_bytes;
  return f;
}

/* Each byte has one tensor, each name is there once, every pointer into the text. */
static void must_fit(const cddp_safetensors *f) {
  uint64_t at = 0, product;
  size_t i, k;
  for (i = 0; i < f->count; i++) {
    const cddp_tensor_info *t = &f->tensors[i];
    REQUIRE(t->begin == at && t->dims >= 0 && t->dims <= CDDP__DIMS_MAX);
    REQUIRE(t->shape >= (const uint64_t *)(const void *)(f->metadata + f->metadata_count));
    REQUIRE(t->shape + t->dims <= f->next_shape);
    REQUIRE(t->name > f->text && t->name + strlen(t->name) < f->text + f->text_size);
    for (product = 1, k = 0; k < (size_t)t->dims; k++) product *= t->shape[k];
    REQUIRE(product == t->count && cddp__st_find_type(t->type) != NULL);
    REQUIRE(product * (uint64_t)cddp__st_find_type(t->type)->bits == t->bytes * 8);
    REQUIRE(cddp__st_find(f, t->name) == &f->tensors[i]);
    REQUIRE(t->name[0] == 0 || cddp__st_find(f, t->name + 1) != &f->tensors[i]);
    at += t->bytes;
  }
  REQUIRE(at == f->data_bytes);
  for (i = 0; i < f->metadata_count; i++)
    REQUIRE(cddp__st_value(f, f->metadata[i].key) == f->metadata[i].value);
}

/* Writes the tensors that a header of ours can have, and reads that. */
static void write_again(const cddp_safetensors *f, const cddp_allocator *a) {
  static cddp__st_item items[1024];
  cddp__buffer text;
  cddp_safetensors *again;
  uint64_t at;
  size_t i, n = 0, k;
  if (f->text_size > 8192) return;
  for (i = 0; i < f->count; i++) {
    const cddp_tensor_info *info = &f->tensors[i];
    if (info->dims > 8) continue;
    memset(&items[n], 0, sizeof items[n]);
    items[n].name = info->name;
    items[n].type = cddp__st_find_type(info->type);
    items[n].shape.dims = info->dims;
    for (k = 0; k < (size_t)info->dims; k++) items[n].shape.size[k] = info->shape[k];
    items[n++].bytes = info->bytes;
  }
  memset(&text, 0, sizeof text);
  at = cddp__st_write_header(a, &text, items, n, f->metadata, f->metadata_count);
  REQUIRE(text.failed || (text.start == 0 && text.end % 8 == 0));
  again = text.failed ? NULL : new_file(a, text.data + 8, text.end - 8, at);
  cddp__free(a, text.data);
  if (again == NULL) return;
  if (cddp__st_parse(again) == CDDP_OK) {
    REQUIRE(again->count == n && again->metadata_count == f->metadata_count);
    must_fit(again);
    for (i = 0; i < n; i++) REQUIRE(cddp__st_find(f, again->tensors[i].name) != NULL);
  } else {
    REQUIRE(w.fail_at > 0 && w.allocations >= w.fail_at);
  }
  cddp_safetensors_close(again);
}

static void target_safetensors(input *in) {
  unsigned char first[8];
  cddp_allocator a = world_allocator();
  cddp_safetensors *f;
  uint64_t bytes;
  size_t size = 0, i;
  world_begin(in);
  for (bytes = 0, i = 0; i < 3; i++) bytes = bytes << 8 | take(in); /* of data, not in the input */
  memset(first, 0, sizeof first);
  if (in->n >= 8) memcpy(first, in->p, 8);
  must_say(cddp__st_header_size(first, in->n + bytes, &size));
  REQUIRE(size <= in->n + bytes);
  take_bytes(in, 8);
  f = new_file(&a, in->p, in->n, bytes);
  if (f != NULL) { /* of any length, whatever the first bytes say */
    cddp_result r = cddp__st_parse(f);
    must_say(r);
    if (r == CDDP_OK) {
      must_fit(f);
      write_again(f, &a);
    }
    cddp_safetensors_close(f);
  }
  world_end();
}

/* --- running ---------------------------------------------------------------------------------- */

typedef void (*target_fn)(input *in);

#ifdef FUZZ_TARGET

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const target_fn all[] = {target_store_server, target_store_client, target_file,
                                  target_meeting, target_link, target_discovery,
                                  target_safetensors};
  input in;
  (void)all;
  in.p = data;
  in.n = size;
  FUZZ_TARGET(&in);
  return 0;
}

#else

static const struct target {
  const char *name;
  target_fn fn;
} targets[] = {{"store_server", target_store_server},
               {"store_client", target_store_client},
               {"file", target_file},
               {"meeting", target_meeting},
               {"link", target_link},
               {"discovery", target_discovery},
               {"safetensors", target_safetensors}};

static void replay(target_fn fn, const char *path) {
  static unsigned char data[1 << 20];
  FILE *f = fopen(path, "rb");
  unsigned char *exact;
  input in;
  CHECK(f != NULL);
  if (f == NULL) return;
  in.n = fread(data, 1, sizeof data, f);
  fclose(f);
  exact = (unsigned char *)malloc(in.n + 1); /* its end is where a sanitizer sees it */
  REQUIRE(exact != NULL);
  memcpy(exact + 1, data, in.n);
  in.p = exact + 1;
  fn(&in);
  free(exact);
}

static void replay_directory(const struct target *t) {
  char path[512];
  struct dirent *e;
  int n = 0;
  DIR *d;
  snprintf(path, sizeof path, "tests/fuzz/corpus/%s", t->name);
  d = opendir(path);
  CHECK(d != NULL);
  while (d != NULL && (e = readdir(d)) != NULL) {
    if (e->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "tests/fuzz/corpus/%s/%s", t->name, e->d_name);
    replay(t->fn, path);
    n++;
  }
  if (d != NULL) closedir(d);
  CHECK(n > 0);
  fprintf(stderr, "  ok   %s, %d inputs\n", t->name, n);
}

int main(int argc, char **argv) {
  size_t i;
  int k;
  for (i = 0; i < sizeof targets / sizeof targets[0]; i++) {
    if (argc < 2) replay_directory(&targets[i]);
    for (k = 2; k < argc && strcmp(argv[1], targets[i].name) == 0; k++)
      replay(targets[i].fn, argv[k]);
  }
  free(w.file);
  return TEST_END();
}

#endif
