/* faults.c - no memory, system calls that fail or do less than asked, and calls that make no sense.

   Works as follows: the implementation is included with its allocations and system calls replaced
   by ones that count, and of which the Nth may fail. Two ranks (processes, or threads of one) run
   a scenario for N = 1, 2, ... until there is no Nth call any more. Each time both ranks must come
   to an end soon, with success or with a result and a text, and leave nothing behind.

     build/plain/faults --thorough     each N on each rank and more scenarios; nightly */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CALL_MALLOC, CALL_CALLOC, CALL_MMAP, CALL_THREAD, CALL_MEMFD, /* memory */
       CALL_SOCKET, CALL_ACCEPT, CALL_EPOLL, CALL_EVENTFD, CALL_OPEN, CALL_PIDFD, /* descriptors */
       CALL_SEND, CALL_RECV, CALL_SENDMSG, CALL_RECVMSG, CALL_CONNECT, CALL_POLL, CALL_WAIT,
       CALL_PREAD, CALL_PWRITE, CALL_FTRUNCATE, CALL_FALLOCATE, CALL_BIND,
       CALL_FLOCK, CALL_FSYNC, CALL_STAT, CALL_RENAME, CALLS };
#define MEMORY (1u << CALL_MALLOC | 1u << CALL_CALLOC | 1u << CALL_MMAP | 1u << CALL_THREAD | \
                1u << CALL_MEMFD)
#define DESCRIPTORS (1u << CALL_SOCKET | 1u << CALL_ACCEPT | 1u << CALL_EPOLL | \
                     1u << CALL_EVENTFD | 1u << CALL_OPEN | 1u << CALL_PIDFD | 1u << CALL_MEMFD)
#define TRANSFERS (1u << CALL_SEND | 1u << CALL_RECV | 1u << CALL_SENDMSG | 1u << CALL_RECVMSG)
#define WAITS (1u << CALL_POLL | 1u << CALL_WAIT)
#define FILES (1u << CALL_PREAD | 1u << CALL_PWRITE | 1u << CALL_FTRUNCATE)

static bool strikes(int call);
static size_t shortened(size_t n);
static bool is_busy(const char *path);
static bool crosses(int fd, const struct sockaddr *to);
static void at_point(const char *name);

static void *faulty_malloc(size_t n) { return strikes(CALL_MALLOC) ? NULL : malloc(n); }
static void *faulty_calloc(size_t n, size_t size) {
  return strikes(CALL_CALLOC) ? NULL : calloc(n, size);
}
static void *faulty_mmap(void *a, size_t n, int protection, int flags, int fd, off_t at) {
  return strikes(CALL_MMAP) ? MAP_FAILED : mmap(a, n, protection, flags, fd, at);
}
static int faulty_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *),
                                 void *arg) {
  return strikes(CALL_THREAD) ? EAGAIN : pthread_create(t, a, fn, arg);
}
static int faulty_socket(int domain, int type, int protocol) {
  return strikes(CALL_SOCKET) ? -1 : socket(domain, type, protocol);
}
static int faulty_epoll_create1(int flags) {
  return strikes(CALL_EPOLL) ? -1 : epoll_create1(flags);
}
static int faulty_epoll_ctl(int epoll, int op, int fd, struct epoll_event *e) {
  return strikes(CALL_EPOLL) ? -1 : epoll_ctl(epoll, op, fd, e);
}
static int faulty_eventfd(unsigned n, int flags) {
  return strikes(CALL_EVENTFD) ? -1 : eventfd(n, flags);
}
static ssize_t faulty_send(int fd, const void *p, size_t n, int flags) {
  return strikes(CALL_SEND) || crosses(fd, NULL) ? -1 : send(fd, p, shortened(n), flags);
}
static ssize_t faulty_recv(int fd, void *p, size_t n, int flags) {
  return strikes(CALL_RECV) || crosses(fd, NULL) ? -1 : recv(fd, p, shortened(n), flags);
}
static ssize_t faulty_sendmsg(int fd, const struct msghdr *m, int flags) {
  return strikes(CALL_SENDMSG) || crosses(fd, NULL) ? -1 : sendmsg(fd, m, flags);
}
static ssize_t faulty_recvmsg(int fd, struct msghdr *m, int flags) {
  size_t n = m->msg_iov[0].iov_len;
  if (strikes(CALL_RECVMSG) || crosses(fd, NULL)) return -1;
  m->msg_iov[0].iov_len = shortened(n);
  if (m->msg_iov[0].iov_len < n) m->msg_iovlen = 1;
  return recvmsg(fd, m, flags);
}
static int faulty_connect(int fd, const struct sockaddr *a, socklen_t n) {
  return strikes(CALL_CONNECT) || crosses(fd, a) ? -1 : connect(fd, a, n);
}
static int faulty_bind(int fd, const struct sockaddr *a, socklen_t n) {
  return strikes(CALL_BIND) ? -1 : bind(fd, a, n);
}
static int faulty_poll(struct pollfd *p, nfds_t n, int ms) {
  return strikes(CALL_POLL) ? -1 : poll(p, n, ms);
}
static int faulty_epoll_wait(int epoll, struct epoll_event *e, int n, int ms) {
  return strikes(CALL_WAIT) ? -1 : epoll_wait(epoll, e, n, ms);
}
static ssize_t faulty_pread(int fd, void *p, size_t n, off_t at) {
  return strikes(CALL_PREAD) ? -1 : pread(fd, p, shortened(n), at);
}
static ssize_t faulty_pwrite(int fd, const void *p, size_t n, off_t at) {
  return strikes(CALL_PWRITE) ? -1 : pwrite(fd, p, shortened(n), at);
}
static int faulty_ftruncate(int fd, off_t n) {
  return strikes(CALL_FTRUNCATE) ? -1 : ftruncate(fd, n);
}
static int faulty_flock(int fd, int operation) {
  return strikes(CALL_FLOCK) ? -1 : flock(fd, operation);
}
static int faulty_fsync(int fd) { return strikes(CALL_FSYNC) ? -1 : fsync(fd); }
static int faulty_fstat(int fd, struct stat *st) { return strikes(CALL_STAT) ? -1 : fstat(fd, st); }
static int faulty_lstat(const char *path, struct stat *st) {
  return strikes(CALL_STAT) ? -1 : lstat(path, st);
}
static int faulty_rename(const char *from, const char *to) {
  return strikes(CALL_RENAME) || is_busy(from) ? -1 : rename(from, to);
}
static int faulty_open(const char *path, int flags, ...) {
  va_list args;
  mode_t mode;
  va_start(args, flags);
  mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
  va_end(args);
  return strikes(CALL_OPEN) ? -1 : open(path, flags, mode);
}
static long faulty_syscall(long number, ...) {
  va_list args;
  long a[6];
  int i;
  va_start(args, number);
  for (i = 0; i < 6; i++) a[i] = va_arg(args, long);
  va_end(args);
  if (number == SYS_accept4 && (strikes(CALL_ACCEPT) || crosses((int)a[0], NULL))) return -1;
  if (number == SYS_fallocate && strikes(CALL_FALLOCATE)) return -1;
  if (number == SYS_memfd_create && strikes(CALL_MEMFD)) return -1;
  if (number == SYS_pidfd_open && strikes(CALL_PIDFD)) return -1;
  return syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#define malloc faulty_malloc
#define calloc faulty_calloc
#define mmap faulty_mmap
#define pthread_create faulty_pthread_create
#define socket faulty_socket
#define epoll_create1 faulty_epoll_create1
#define epoll_ctl faulty_epoll_ctl
#define eventfd faulty_eventfd
#define sendmsg faulty_sendmsg
#define recvmsg faulty_recvmsg
#define connect faulty_connect
#define bind faulty_bind
#define poll faulty_poll
#define epoll_wait faulty_epoll_wait
#define ftruncate faulty_ftruncate
#define open faulty_open
#define flock(fd, operation) faulty_flock(fd, operation) /* there is a struct of that name */
#define fsync faulty_fsync
#define fstat faulty_fstat
#define lstat faulty_lstat
#define rename faulty_rename
#define syscall faulty_syscall
#define recv faulty_recv /* with the header's parameters and fields of that name */
#define send faulty_send
#define pread faulty_pread
#define pwrite faulty_pwrite

#define CDDP__POINT(name) at_point(name)
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#undef malloc
#undef calloc
#undef mmap
#undef pthread_create
#undef socket
#undef connect
#undef bind
#undef poll
#undef open
#undef flock
#undef fsync
#undef fstat
#undef lstat
#undef rename
#undef syscall
#undef recv
#undef send

#include "../ranks.h"

#include <sys/prctl.h>

/* --- which call fails --- */

static struct fault {
  unsigned calls; /* which of them, a bit each */
  int error;
  uint32_t number;          /* of the call that fails; 0: none */
  bool onwards;             /* and each one behind it */
  bool tiny;                /* a byte a time */
  int busy;                 /* what renaming an open file gives; 0: it works */
  bool armed;
  uint32_t counted; /* calls so far */
  int struck;               /* which call it was, or -1 */
} fault;

static bool strikes(int call) {
  uint32_t number;
  if (!__atomic_load_n(&fault.armed, __ATOMIC_RELAXED) || !(fault.calls >> call & 1)) return false;
  number = __atomic_add_fetch(&fault.counted, 1, __ATOMIC_SEQ_CST);
  if (fault.onwards ? fault.number == 0 || number < fault.number : number != fault.number)
    return false;
  __atomic_store_n(&fault.struck, call, __ATOMIC_RELAXED);
  errno = fault.error;
  return true;
}

/* As on a file system that renames no file that this process has open. */
static bool is_busy(const char *path) {
  struct stat file, st;
  int fd;
  if (fault.busy == 0 || stat(path, &file) != 0) return false;
  for (fd = 0; fd < 256; fd++)
    if (fstat(fd, &st) == 0 && st.st_dev == file.st_dev && st.st_ino == file.st_ino) break;
  errno = fault.busy;
  return fd < 256;
}

/* --- a network that is cut into two halves --- */

static struct halves {
  int cut, numbers;           /* numbers: joining processes that were admitted */
  unsigned char owner[65536]; /* by port: 1 + the rank that owns it */
} *halves;                    /* NULL: there is one network. Memory of all ranks */
static int halves_rank;

static int port_of(const struct sockaddr_storage *a) {
  if (a->ss_family == AF_INET)
    return ntohs(((const struct sockaddr_in *)(const void *)a)->sin_port);
  if (a->ss_family != AF_INET6) return 0;
  return ntohs(((const struct sockaddr_in6 *)(const void *)a)->sin6_port);
}

static int half_of(int rank) { return rank == 1 || rank == 2; }

/* Whether the socket's other end, or the address, is in the other half, behind the cut. */
static bool crosses(int fd, const struct sockaddr *to) {
  struct sockaddr_storage here, there;
  socklen_t size = sizeof here, peer_size = sizeof there;
  int owner;
  if (halves == NULL) return false;
  memset(&there, 0, sizeof there);
  if (getsockname(fd, (struct sockaddr *)&here, &size) == 0)
    __atomic_store_n(&halves->owner[port_of(&here)], (unsigned char)(1 + halves_rank),
                     __ATOMIC_SEQ_CST);
  if (to != NULL)
    memcpy(&there, to, to->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                       : to->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                   : sizeof to->sa_family);
  else if (getpeername(fd, (struct sockaddr *)&there, &peer_size) != 0)
    return false;
  owner = __atomic_load_n(&halves->owner[port_of(&there)], __ATOMIC_SEQ_CST);
  if (port_of(&there) == 0 || owner == 0 || half_of(owner - 1) == half_of(halves_rank) ||
      !__atomic_load_n(&halves->cut, __ATOMIC_SEQ_CST))
    return false;
  errno = ETIMEDOUT;
  return true;
}

/* Cuts the network before the table with both joining processes is sent. */
static void at_point(const char *name) {
  if (halves != NULL && strcmp(name, "elastic number") == 0 &&
      __atomic_add_fetch(&halves->numbers, 1, __ATOMIC_SEQ_CST) == 2)
    __atomic_store_n(&halves->cut, 1, __ATOMIC_SEQ_CST);
}

static size_t shortened(size_t n) { return fault.tiny && n > 1 ? 1 : n; }

static void arm(bool on) { __atomic_store_n(&fault.armed, on, __ATOMIC_RELAXED); }

/* --- scenarios --- */

typedef cddp_result (*scenario_fn)(cddp_group *g, int variant);

enum { SMALL, STAGED, DIRECT };

/* variant: kind of the collective, size, and whether it is asynchronous */
static cddp_result run_collective(cddp_group *g, int variant) {
  static const size_t counts[] = {3, 9000, 9000};
  int kind = variant % 9, size = variant / 9 % 3, n = cddp_world_size(g);
  bool async = variant >= 27;
  size_t count = counts[size], bytes = count * (size_t)n * sizeof(float);
  float *in = (float *)(size == DIRECT ? cddp_alloc(g, bytes) : malloc(bytes));
  float *out = (float *)(size == DIRECT ? cddp_alloc(g, bytes) : malloc(bytes));
  cddp_work *w = NULL, **work = async ? &w : NULL;
  cddp_result r = in != NULL && out != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK) {
    memset(in, 0, bytes);
    memset(out, 0, bytes);
    switch (kind) {
    case 0: r = cddp_all_reduce(g, in, count, CDDP_F32, CDDP_SUM, work); break;
    case 1: r = cddp_reduce(g, in, count, CDDP_F32, CDDP_SUM, 0, work); break;
    case 2: r = cddp_broadcast(g, in, count, CDDP_F32, 0, work); break;
    case 3: r = cddp_all_gather(g, in, out, count, CDDP_F32, work); break;
    case 4: r = cddp_gather(g, in, out, count, CDDP_F32, 0, work); break;
    case 5: r = cddp_scatter(g, in, out, count, CDDP_F32, 0, work); break;
    case 6: r = cddp_reduce_scatter(g, in, out, count, CDDP_F32, CDDP_SUM, work); break;
    case 7: r = cddp_all_to_all(g, in, out, count, CDDP_F32, work); break;
    default: r = cddp_barrier(g);
    }
  }
  if (w != NULL) r = cddp_wait(w);
  if (size == DIRECT) {
    cddp_free(g, in);
    cddp_free(g, out);
  } else {
    free(in);
    free(out);
  }
  return r;
}

static cddp_result run_mail(cddp_group *g, int variant) {
  size_t count = variant & 1 ? 30000 : 10;
  int n = cddp_world_size(g), me = cddp_rank(g), to = (me + 1) % n, from = (me + n - 1) % n;
  float *out = (float *)(variant & 2 ? cddp_alloc(g, count * 4) : calloc(count, 4));
  float *in = (float *)calloc(count, 4);
  cddp_work *receipt = NULL, *sent = NULL;
  cddp_result r = out != NULL && in != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY, r2;
  if (r == CDDP_OK) r = cddp_recv(g, in, count, CDDP_F32, from, 0, &receipt);
  if (r == CDDP_OK) r = cddp_send(g, out, count, CDDP_F32, to, 0, variant & 4 ? &sent : NULL);
  if (r != CDDP_OK && receipt != NULL) { /* nothing will come: the group must end the wait */
    cddp__break(g, r);
  }
  if (receipt != NULL && (r2 = cddp_wait(receipt)) != CDDP_OK) r = r2;
  if (sent != NULL && (r2 = cddp_wait(sent)) != CDDP_OK) r = r2;
  if (variant & 2)
    cddp_free(g, out);
  else
    free(out);
  free(in);
  return r;
}

/* Rank 1 receives the last of many messages first: its request is in memory that rank 1 maps. */
static cddp_result run_crowd(cddp_group *g, int variant) {
  enum { MESSAGES = 3 * CDDP__SENDS };
  int i;
  bool sends = cddp_rank(g) == 0;
  cddp_work *sent[MESSAGES] = {NULL};
  float x = 1;
  cddp_result r = CDDP_OK, r2;
  (void)variant;
  for (i = 0; r == CDDP_OK && sends && i < MESSAGES; i++)
    r = cddp_send(g, &x, 1, CDDP_F32, 1, i, &sent[i]);
  if (r == CDDP_OK) r = cddp_barrier(g);
  for (i = MESSAGES - 1; r == CDDP_OK && !sends && i >= 0; i--)
    r = cddp_recv(g, &x, 1, CDDP_F32, 0, i, NULL);
  for (i = 0; i < MESSAGES; i++)
    if (sent[i] != NULL && (r2 = cddp_wait(sent[i])) != CDDP_OK) r = r2;
  return r;
}

static cddp_result run_groups(cddp_group *g, int variant) {
  static const int both[] = {1, 0}, one[] = {0};
  cddp_group *s = NULL;
  bool alone = cddp_world_size(g) == 1;
  cddp_result r = variant == 0   ? cddp_group_split(g, 0, 0, &s)
                  : variant == 1 ? cddp_group_split(g, cddp_rank(g), 0, &s)
                                 : cddp_group_new(g, alone ? one : both, alone ? 1 : 2, &s);
  if (r == CDDP_OK) r = cddp_barrier(s);
  cddp_destroy(s);
  return r;
}

/* Groups that come one after the other in the same memory, their ranks in turn the other way
   round. */
static cddp_result run_reuse(cddp_group *g, int variant) {
  int32_t mine = cddp_rank(g), n = cddp_world_size(g), all[2], value, i, k;
  cddp_group *s = NULL;
  cddp_result r = CDDP_OK;
  for (k = 0; r == CDDP_OK && k < variant; k++) {
    r = cddp_group_split(g, 0, k % 2 ? -mine : mine, &s);
    value = mine + 10 * k; /* not what an old step of this memory has */
    if (r == CDDP_OK) r = cddp_all_gather(s, &value, all, 1, CDDP_I32, NULL);
    for (i = 0; r == CDDP_OK && i < n; i++) CHECK_EQ(all[i], (k % 2 ? n - 1 - i : i) + 10 * k);
    cddp_destroy(s);
    if (r == CDDP_OK) r = cddp_barrier(g); /* all have left: its memory is freed next */
  }
  return r;
}

/* variant: bit 0 gradients placed, 1 a hook, 2 find_unused, 3 shared weights, 4 wait, not step */
static cddp_result run_model(cddp_group *g, int variant) {
  enum { PARAMS = 3, EACH = 700 };
  cddp_param p[PARAMS];
  float *grads[PARAMS];
  cddp_ddp_desc d;
  cddp_sgd_desc sd;
  cddp_ddp *ddp = NULL;
  cddp_optim *sgd = NULL;
  cddp_result r = CDDP_OK;
  int i, step;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  memset(&sd, 0, sizeof sd);
  d.bucket_cap_mb = 0.003;
  if (variant & 2) d.comm_hook = cddp_bf16_compress_hook;
  d.find_unused_parameters = variant & 4;
  sd.lr = 0.1;
  sd.momentum = 0.5;
  for (i = 0; i < PARAMS; i++) {
    p[i].count = EACH;
    p[i].data = variant & 8 ? cddp_alloc(g, EACH * 4) : calloc(EACH, 4);
    grads[i] = (float *)calloc(EACH, 4);
    if (!(variant & 1)) p[i].grad = grads[i];
    if (p[i].data == NULL) r = CDDP_OUT_OF_MEMORY;
  }
  if (r == CDDP_OK) r = cddp_ddp_create(&ddp, g, p, PARAMS, &d);
  if (r == CDDP_OK) r = cddp_sgd_create(&sgd, p, PARAMS, &sd);
  for (step = 0; r == CDDP_OK && step < 2; step++) {
    for (i = PARAMS - 1; r == CDDP_OK && i >= (variant & 4 ? 1 : 0); i--)
      r = cddp_ddp_ready(ddp, i);
    if (r == CDDP_OK) r = variant & 16 ? cddp_ddp_wait(ddp) : cddp_ddp_step(ddp, sgd);
    if (r == CDDP_OK && (variant & 16)) r = cddp_optim_step(sgd);
  }
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  for (i = 0; i < PARAMS; i++) {
    free(grads[i]);
    if (variant & 8)
      cddp_free(g, p[i].data);
    else
      free(p[i].data);
  }
  return r;
}

static char checkpoint[300];

/* Saves over a file that is there, and loads it; what fails must leave a whole file and no other.
   variant 1: the momentum in pieces on the ranks. */
static cddp_result run_checkpoint(cddp_group *g, int variant) {
  float w[1000] = {1}, grad[1000] = {0};
  cddp_param p = {"w", w, NULL, 1000, CDDP_F32};
  cddp_metadata m = {"note", "x"};
  char text[8], temporary[310];
  cddp_sampler_desc so;
  cddp_sgd_desc o;
  cddp_checkpoint_desc d;
  cddp_sampler s;
  cddp_ddp *ddp = NULL;
  cddp_result r = CDDP_OK;
  cddp_safetensors *f = NULL;
  bool armed = __atomic_load_n(&fault.armed, __ATOMIC_RELAXED);
  memset(&so, 0, sizeof so);
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  so.dataset_size = 5;
  o.lr = o.momentum = 0.5;
  p.grad = variant == 1 ? NULL : grad;
  d.sampler = &s;
  d.metadata = &m;
  d.metadata_count = 1;
  d.text = text;
  d.text_size = sizeof text;
  CHECK_OK(cddp_sampler_init(&s, &so));
  arm(false); /* what comes before is tested elsewhere */
  if (variant == 1) r = cddp_ddp_create(&ddp, g, &p, 1, NULL);
  if (r == CDDP_OK) r = cddp_sgd_create(&d.optim, &p, 1, &o);
  if (r == CDDP_OK && variant == 1) r = cddp_ddp_ready(ddp, 0);
  if (r == CDDP_OK) r = variant == 1 ? cddp_ddp_step(ddp, d.optim) : cddp_optim_step(d.optim);
  arm(armed);
  if (r == CDDP_OK) r = cddp_save(g, checkpoint, &p, 1, &d);
  if (r == CDDP_OK) r = cddp_load(g, checkpoint, &p, 1, &d);
  arm(false);
  snprintf(temporary, sizeof temporary, "%s.tmp", checkpoint);
  if (cddp_rank(g) == 0) {
    CHECK_OK(cddp_safetensors_open(&f, checkpoint));
    CHECK(cddp_safetensors_count(f) == 3 && access(temporary, F_OK) != 0);
    cddp_safetensors_close(f);
  }
  CHECK(w[0] == 1 && w[999] == 0 && cddp_optim_lr(d.optim) == 0.5);
  if (r == CDDP_OK) { /* and training goes on */
    if (variant == 1) r = cddp_ddp_ready(ddp, 0);
    if (r == CDDP_OK) r = variant == 1 ? cddp_ddp_step(ddp, d.optim) : cddp_optim_step(d.optim);
  }
  cddp_sampler_destroy(&s);
  cddp_optim_destroy(d.optim);
  cddp_ddp_destroy(ddp);
  return r;
}

/* Saves AdamW's states without max_exp_avg_sq (g NULL), or loads them with it. */
static cddp_result run_amsgrad(cddp_group *g, int variant) {
  float w[100] = {1}, grad[100] = {1};
  cddp_param p = {"w", w, grad, 100, CDDP_F32};
  cddp_adamw_desc o;
  cddp_checkpoint_desc d;
  cddp_result r;
  (void)variant;
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  o.lr = 0.5;
  o.amsgrad = g != NULL;
  d.partial = true;
  r = cddp_adamw_create(&d.optim, &p, 1, &o);
  if (r == CDDP_OK && g == NULL) r = cddp_optim_step(d.optim);
  if (r == CDDP_OK)
    r = g == NULL ? cddp_save(g, checkpoint, &p, 1, &d) : cddp_load(g, checkpoint, &p, 1, &d);
  cddp_optim_destroy(d.optim);
  return r;
}

static cddp_result run_nothing(cddp_group *g, int variant) {
  (void)variant;
  return cddp_barrier(g);
}

/* --- two ranks run one --- */

typedef struct outcome {
  cddp_result result;
  int struck; /* which call failed, or -1 */
  int balance, fds, stale;
  bool threads, ended;
  char text[CDDP__ERROR_MAX];
} outcome;

static struct job {
  scenario_fn fn;
  int variant, victim, ranks, port;
  bool all;   /* from cddp_init on; else after it */
  bool first; /* else: the first collective counts, in which hosts connect */
  bool threads;
  double timeout_s;
  char method[300]; /* "": tcp on port */
  outcome out[2];
} *job;

static int balance;

static void *counted_alloc(size_t bytes, void *user_data) {
  void *p = strikes(CALL_MALLOC) ? NULL : malloc(bytes);
  (void)user_data;
  if (p != NULL) __atomic_add_fetch(&balance, 1, __ATOMIC_RELAXED);
  return p;
}
static void counted_free(void *p, void *user_data) {
  (void)user_data;
  __atomic_sub_fetch(&balance, 1, __ATOMIC_RELAXED);
  free(p);
}

static void note(outcome *o, cddp_result r) {
  o->result = r;
  o->struck = fault.struck;
  if (r != CDDP_OK) snprintf(o->text, sizeof o->text, "%s", cddp_error());
}

/* Closed descriptors that cddp still takes for its sockets: in a forked child it would close what
   has their numbers then. */
static int stale_sockets(void) {
  int fd, n = 0;
  for (fd = 0; fd < CDDP__OWN_SOCKETS; fd++)
    n += (cddp__own_sockets[fd / 32] >> fd % 32 & 1) != 0 && fcntl(fd, F_GETFD) < 0;
  return n;
}

static int process_life(int rank, void *arg) {
  outcome *o = &job->out[rank];
  cddp_group_desc d;
  cddp_group *g = NULL;
  char url[64];
  cddp_result r;
  int fds = ranks_open_fds();
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  memset(&d, 0, sizeof d);
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", job->port);
  d.init_method = job->method[0] ? job->method : url;
  d.rank = rank;
  d.world_size = job->ranks;
  d.timeout_s = job->timeout_s;
  d.allocator.alloc = counted_alloc;
  d.allocator.free = counted_free;
  if (rank != job->victim) fault.number = 0;
  ranks_place(rank);
  if (job->all) arm(true);
  r = cddp_init(&g, &d);
  if (r == CDDP_OK && !job->all) {
    if (!job->first) r = cddp_barrier(g); /* which connects the hosts */
    arm(true);
  }
  if (r == CDDP_OK) r = job->fn(g, job->variant);
  note(o, r);
  cddp_destroy(g);
  arm(false);
  o->balance = balance;
  o->fds = ranks_open_fds() - fds;
  o->stale = stale_sockets();
  o->threads = ranks_threads_left(1);
  o->ended = true;
  return 0;
}

static int thread_life(cddp_group *g, void *arg) {
  (void)arg;
  note(&job->out[cddp_rank(g)], job->fn(g, job->variant));
  return job->out[cddp_rank(g)].result != CDDP_OK;
}

static void describe(const char *name, uint32_t number) {
  int i;
  for (i = 0; i < job->ranks; i++)
    fprintf(stderr, "  %s, variant %d, call %u of %x, errno %d: rank %d%s (struck %d): %s: %s\n",
            name, job->variant, number, fault.calls, fault.error, i,
            i == job->victim ? ", the victim" : "", job->out[i].struck,
            cddp_result_name(job->out[i].result), job->out[i].text);
}

/* One run; whether the fault struck. */
static bool run_ranks(const char *name, uint32_t number) {
  pid_t pids[2];
  int status[2] = {0, 0}, i, before = test_failures;
  int fds = ranks_open_fds();
  bool struck = false;
  memset(job->out, 0, sizeof job->out);
  fault.number = number;
  fault.struck = -1;
  __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
  job->port = ranks_free_port();
  if (job->threads) {
    cddp_result r;
    arm(true);
    r = cddp_run_threads(thread_life, NULL, job->ranks);
    arm(false);
    struck = fault.struck >= 0;
    CHECK(r == CDDP_OK || (struck && cddp_error()[0] != 0));
    CHECK(ranks_threads_left(1));
  } else {
    for (i = 0; i < job->ranks; i++) pids[i] = ranks_fork(process_life, i, NULL);
    ranks_join(pids, job->ranks, RANKS_WITHIN(10), status);
    for (i = 0; i < job->ranks; i++) {
      const outcome *o = &job->out[i];
      struck = struck || o->struck >= 0;
      CHECK_EQ(status[i], 0);
      CHECK(o->ended);
      CHECK_EQ(o->balance, 0);
      CHECK_EQ(o->fds, 0);
      CHECK_EQ(o->stale, 0);
      CHECK(o->threads || !o->ended);
      CHECK(o->result == CDDP_OK || o->text[0] != 0);
    }
  }
  CHECK_EQ(ranks_open_fds(), fds);
  if (test_failures != before) describe(name, number);
  return struck;
}

/* The same. Where it did not strike all is well, with a timeout that no loaded machine exceeds. */
static bool run_once(const char *name, uint32_t number) {
  double timeout_s = job->timeout_s;
  int i;
  if (run_ranks(name, number)) return true;
  job->timeout_s = 20;
  if (timeout_s < 20 && !job->threads && job->out[0].result != CDDP_OK && run_ranks(name, number)) {
    job->timeout_s = timeout_s;
    return true;
  }
  job->timeout_s = timeout_s;
  for (i = 0; i < job->ranks; i++) CHECK_IS(job->out[i].result, CDDP_OK);
  return false;
}

/* The results that a lack of memory may have. */
static void check_memory(const char *name, uint32_t number) {
  int i, before = test_failures;
  for (i = 0; i < job->ranks; i++) {
    cddp_result r = job->out[i].result;
    const outcome *o = &job->out[i];
    bool thread = strstr(o->text, "pthread_create") != NULL, memfd = o->struck == CALL_MEMFD;
    bool mine = job->threads || i == job->victim;
    if (r == CDDP_OK || r == CDDP_OUT_OF_MEMORY) continue;
    if (r == CDDP_SYSTEM && (thread || memfd || !mine || job->threads)) continue;
    if (job->all && (r == CDDP_NETWORK || r == CDDP_PEER_LOST || r == CDDP_TIMEOUT))
      continue; /* the store's server had none for the other's connection, say */
    CHECK(!mine || job->threads);
    CHECK(r == CDDP_PEER_LOST || r == CDDP_TIMEOUT);
  }
  if (test_failures != before) describe(name, number);
}

static bool thorough; /* each N on each rank, instead of in turn */

/* For every N. strict: whatever fails, the scenario succeeds. */
static int for_every(const char *name, scenario_fn fn, int variant, unsigned calls, int error,
                     bool strict) {
  uint32_t number, stride = RANKS_SLOW ? 5 : 1;
  int spared = 0, most = 0;
  job->fn = fn;
  job->variant = variant;
  fault.calls = calls;
  fault.error = error;
  for (number = 1; number < 4000 && spared < 2; number += thorough ? 1 : stride) {
    bool struck;
    int i;
    job->victim = thorough ? (int)number % job->ranks : (int)(number / stride) % job->ranks;
    struck = run_once(name, thorough ? (number + 1) / 2 : number);
    spared = struck ? 0 : spared + 1;
    if (!struck) continue;
    if ((int)number > most) most = (int)number;
    if (calls == MEMORY) check_memory(name, number);
    for (i = 0; strict && i < job->ranks; i++) {
      CHECK_IS(job->out[i].result, CDDP_OK);
      if (job->out[i].result != CDDP_OK) describe(name, number);
    }
    if (test_failures > 20) break;
  }
  return most;
}

static void prepare(int ranks, bool threads, bool all) {
  memset(job, 0, sizeof *job);
  job->ranks = ranks;
  job->threads = threads;
  job->all = all;
  job->timeout_s = all ? RANKS_WITHIN(0.15) : 20;
}

/* --- no memory --- */

static void test_memory_init(void) {
  prepare(1, false, true);
  CHECK(for_every("cddp_init alone", run_nothing, 0, MEMORY, ENOMEM, false) > (RANKS_SLOW ? 0 : 3));
  prepare(2, false, true);
  CHECK(for_every("cddp_init", run_nothing, 0, MEMORY, ENOMEM, false) > 10);
}

static void test_memory_collectives(void) {
  int v;
  for (v = 0; v < 54; v++) { /* direct ones all, of the others some */
    if (!thorough && (v / 9 % 3 != DIRECT ? v % 5 != 0 : v >= 27 && v % 3 != 0)) continue;
    if (RANKS_SLOW && v % 4 != 0) continue;
    prepare(2, false, false);
    for_every("collective", run_collective, v, MEMORY, ENOMEM, false);
  }
}

static void test_memory_mail(void) {
  int v;
  for (v = 0; v < 8; v++) {
    prepare(2, false, false);
    CHECK(for_every("send and recv", run_mail, v, MEMORY, ENOMEM, false) > 0);
  }
  prepare(2, false, false);
  job->timeout_s = 5;
  fault.onwards = true;
  CHECK(for_every("many messages", run_crowd, 0, MEMORY, ENOMEM, false) > 1);
  fault.onwards = false;
}

static void test_memory_groups(void) {
  int v, ranks;
  for (v = 0; v < 3; v++)
    for (ranks = 1; ranks <= 2; ranks++) {
      prepare(ranks, false, false);
      CHECK(for_every("group", run_groups, v, MEMORY, ENOMEM, false) > 0);
    }
}

static void test_memory_kept(void) {
  int calls;
  prepare(2, false, false);
  calls = for_every("reuse", run_reuse, 6, 1u << CALL_FALLOCATE, EOPNOTSUPP, true);
  CHECK(calls > (RANKS_SLOW ? 0 : 1));
}

static void test_memory_models(void) {
  static const int variants[] = {3, 4, 1, 0, 2, 16 + 2, 16 + 8, 16 + 1};
  size_t v;
  for (v = 0; v < sizeof variants / sizeof variants[0]; v++) {
    if (!thorough && v % (RANKS_SLOW ? 4 : 3) != 0) continue;
    prepare(2, false, false);
    CHECK(for_every("model", run_model, variants[v], MEMORY, ENOMEM, false) > 20);
  }
}

static void test_memory_threads(void) {
  int ranks;
  for (ranks = 1; ranks <= 2; ranks++) {
    prepare(ranks, true, true);
    for_every("run_threads", run_collective, 27, MEMORY, ENOMEM, false);
    for_every("run_threads", run_model, 1, MEMORY, ENOMEM, false);
    for_every("run_threads", run_mail, 3, MEMORY, ENOMEM, false);
    for_every("run_threads", run_groups, 0, MEMORY, ENOMEM, false);
  }
}

static int do_nothing(int rank, void *arg) {
  (void)rank, (void)arg;
  return 0;
}

static void test_memory_spawn(void) {
  uint32_t number;
  int fds = ranks_open_fds();
  fault.calls = MEMORY | DESCRIPTORS;
  fault.error = EMFILE;
  for (number = 1; number < 100; number++) {
    cddp_result r;
    fault.number = number;
    fault.struck = -1;
    __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
    arm(true);
    r = cddp_spawn(do_nothing, NULL, 2);
    arm(false);
    CHECK(r == CDDP_OK || (fault.struck >= 0 && cddp_error()[0] != 0));
    CHECK_EQ(ranks_open_fds(), fds);
    CHECK(ranks_no_children());
    if (fault.struck < 0) break;
  }
  CHECK(number > 3 && number < 100);
}

static void test_memory_sampler(void) {
  cddp_sampler_desc d;
  cddp_sampler s;
  size_t index, batch[3];
  memset(&d, 0, sizeof d);
  d.dataset_size = 10;
  d.shuffle = true;
  CHECK_OK(cddp_sampler_init(&s, &d));
  fault.calls = MEMORY;
  fault.number = 1;
  __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
  arm(true);
  CHECK(!cddp_sampler_next(&s, &index));
  CHECK_IS(s.result, CDDP_OUT_OF_MEMORY);
  CHECK(strncmp(cddp_error(), "cddp_sampler_next:", 18) == 0);
  CHECK(cddp_sampler_next(&s, &index)); /* the next one may have some again */
  cddp_sampler_set_epoch(&s, 1);
  __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 1, 3, batch), 0);
  CHECK_IS(s.result, CDDP_OUT_OF_MEMORY);
  CHECK(strncmp(cddp_error(), "cddp_sampler_batch:", 19) == 0);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 1, 3, batch), 3);
  arm(false);
  cddp_sampler_destroy(&s);
}

/* --- system calls --- */

static void test_interrupted(void) { /* of which nobody is to hear */
  prepare(2, false, true);
  job->timeout_s = RANKS_WITHIN(10);
  for_every("EINTR", run_nothing, 0, TRANSFERS | WAITS, EINTR, true);
  for_every("EAGAIN", run_nothing, 0, TRANSFERS, EAGAIN, true);
}

/* For want of memory in the kernel a call is tried again. */
static void test_no_buffers(void) {
  static const int errors[] = {ENOBUFS, ENOMEM}, variants[] = {0, 2, 3, 7, 27};
  int i, k, calls = 0;
  for (i = 0; i < 2; i++) {
    prepare(2, false, true);
    job->timeout_s = RANKS_WITHIN(10);
    for_every("no buffers", run_nothing, 0, TRANSFERS, errors[i], true);
    setenv("TEST_HOSTS", "ab", 1);
    for (k = 0; k < (thorough ? 5 : 2); k++)
      calls += for_every("no buffers, hosts", run_collective, variants[k], TRANSFERS, errors[i],
                         true);
    unsetenv("TEST_HOSTS");
  }
  CHECK(calls > 40);
}

/* A rank without memory for a connection accepts it later: no rank waits until the time-out. */
static void test_accepted_later(void) {
  int k, calls = 0;
  setenv("TEST_HOSTS", "ab", 1);
  for (k = 0; k < (RANKS_SLOW ? 1 : 4); k++) {
    prepare(2, false, false);
    job->first = true;
    job->timeout_s = 60;
    calls += for_every("collective, hosts", run_collective, k, MEMORY, ENOMEM, false);
  }
  fault.onwards = true; /* and the connection of which it has none is closed for good */
  for_every("from then on", run_collective, 0, 1u << CALL_MALLOC, ENOMEM, false);
  fault.onwards = false;
  unsetenv("TEST_HOSTS");
  CHECK(calls > (RANKS_SLOW ? 0 : 12)); /* on one host there are fewer */
}

static void test_tiny(void) { /* a byte a call */
  int i;
  prepare(2, false, true);
  job->timeout_s = RANKS_WITHIN(10);
  job->fn = run_nothing;
  fault.calls = 0;
  fault.tiny = true;
  run_once("a byte a call", 0);
  for (i = 0; i < 2; i++) CHECK_IS(job->out[i].result, CDDP_OK);
  fault.tiny = false;
}

static void test_descriptors(void) {
  prepare(2, false, true);
  /* A rank makes four to six calls: without a store they depend on which rank comes first. Under a
     sanitizer only every fifth call fails. */
  CHECK(for_every("EMFILE", run_nothing, 0, DESCRIPTORS, EMFILE, false) > (RANKS_SLOW ? 0 : 3));
}

static void test_resets(void) {
  prepare(2, false, true);
  CHECK(for_every("ECONNRESET", run_nothing, 0, TRANSFERS | 1u << CALL_CONNECT, ECONNRESET,
                  false) > 4);
}

static void test_files(void) {
  const char *dir = getenv("TMPDIR");
  prepare(2, false, true);
  snprintf(job->method, sizeof job->method, "file://%s/cddp-faults-%d", dir ? dir : "/tmp",
           (int)getpid());
  CHECK(for_every("ENOSPC", run_nothing, 0, FILES, ENOSPC, false) > 0);
  CHECK(access(job->method + 7, F_OK) != 0);
  job->timeout_s = RANKS_WITHIN(10);
  for_every("EINTR in files", run_nothing, 0, 1u << CALL_PREAD | 1u << CALL_PWRITE, EINTR, true);
}

static int begin_checkpoint(cddp_group *g, void *arg) {
  (void)arg;
  return run_checkpoint(g, 0) != CDDP_OK;
}

/* What a file system does besides reading and writing. Each call once, and from the Nth on, in the
   process that writes; whatever fails, the old file or the new one is there, whole and alone. */
static void test_file_system(void) {
  static const int unsynced[] = {EINVAL, ENOSYS, EOPNOTSUPP}, busy[] = {EBUSY, ENOTSUP, ETXTBSY};
  static const int calls[] = {CALL_FLOCK, CALL_FSYNC, CALL_STAT, CALL_RENAME};
  size_t i;
  for (i = 0; i < 2 * sizeof calls / sizeof *calls; i++) {
    prepare(1, false, false);
    fault.onwards = i % 2;
    CHECK(for_every("file system, EIO", run_checkpoint, 0, 1u << calls[i / 2], EIO, false) > 0);
  }
  prepare(1, false, false); /* FUSE file systems that cannot sync */
  for (i = 0; i < sizeof unsynced / sizeof *unsynced; i++)
    for_every("no fsync", run_checkpoint, 0, 1u << CALL_FSYNC, unsynced[i], true);
  fault.onwards = false;
  for_every("EINTR", run_checkpoint, 0, 1u << CALL_FLOCK | 1u << CALL_FSYNC | 1u << CALL_OPEN,
            EINTR, true);
  for (i = 0; i < sizeof busy / sizeof *busy; i++) { /* or cannot rename what is open */
    fault.calls = 0;
    fault.busy = busy[i];
    job->fn = run_checkpoint;
    CHECK(!run_once("rename of an open file", 0));
  }
  fault.busy = 0;
}

/* Memory for states that the file lacks: a load without it fails on both ranks. */
static void test_states_agree(void) {
  const char *dir = getenv("TMPDIR");
  uint32_t number = 0;
  int failed = 0;
  bool struck = true;
  snprintf(checkpoint, sizeof checkpoint, "%s/cddp-faults-%d.safetensors", dir ? dir : "/tmp",
           (int)getpid());
  CHECK_OK(run_amsgrad(NULL, 0));
  prepare(2, false, false);
  job->fn = run_amsgrad;
  fault.calls = MEMORY;
  fault.error = ENOMEM;
  for (; struck && number < 100; number++) {
    job->victim = number % 2 ? 0 : 1;
    struck = run_ranks("load", number / 2 + 1);
    CHECK_EQ(job->out[0].result == CDDP_OK, job->out[1].result == CDDP_OK);
    failed += job->out[0].result != CDDP_OK;
  }
  CHECK(failed > 4);
  unlink(checkpoint);
}

static void test_checkpoint(void) {
  const char *dir = getenv("TMPDIR");
  bool was = thorough;
  int variant;
  snprintf(checkpoint, sizeof checkpoint, "%s/cddp-faults-%d.safetensors", dir ? dir : "/tmp",
           (int)getpid());
  CHECK_OK(cddp_run_threads(begin_checkpoint, NULL, 1)); /* the file that must stay */
  for (variant = 0; variant < 2; variant++) {
    prepare(2, false, false);
    CHECK(for_every("checkpoint", run_checkpoint, variant, MEMORY, ENOMEM, false) > 9);
  }
  thorough = true; /* each N on each rank: only rank 0 has to do with files */
  prepare(2, false, false);
  CHECK(for_every("checkpoint, ENOSPC", run_checkpoint, 1, FILES, ENOSPC, false) > 14);
  prepare(2, false, false);
  CHECK(for_every("checkpoint, EMFILE", run_checkpoint, 0, 1u << CALL_OPEN, EMFILE, false) > 4);
  thorough = was;
  prepare(2, false, false);
  for_every("checkpoint, EINTR", run_checkpoint, 1, 1u << CALL_PREAD | 1u << CALL_PWRITE, EINTR,
            true);
  prepare(2, false, false);
  fault.calls = 0;
  fault.tiny = true; /* a byte a call */
  job->fn = run_checkpoint;
  CHECK(!run_once("checkpoint, a byte a call", 0));
  fault.tiny = false;
  test_file_system();
  unlink(checkpoint);
}

/* --- one call that fails in one rank of an elastic model: at most that rank ends --- */

enum { FIRST = 3, JOINER = FIRST, WEIGHTS = 30000 };

typedef struct elastic_run {
  int port, victim, created, ended; /* ended: the joining process has joined or failed */
  const char *hosts;
  outcome out[FIRST + 2];
} elastic_run;

static elastic_run *elastic;

static int read_flag(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

/* A step in which every shard's gradient is 1. The weights are those of a run without failures. */
static cddp_result elastic_step(cddp_ddp *ddp, cddp_optim *optim, const cddp_param *p, bool dies) {
  float w = 0, momentum = 0;
  const float *weights = (const float *)p->data;
  int shard, i;
  uint64_t t;
  cddp_result r;
  while (cddp_ddp_next_shard(ddp, &shard)) {
    if (dies) raise(SIGKILL);
    for (i = 0; i < WEIGHTS; i++) ((float *)p->grad)[i] += 1;
    (void)cddp_ddp_ready(ddp, 0); /* the step returns its error */
  }
  if ((r = cddp_ddp_step(ddp, optim)) != CDDP_OK) return r;
  for (t = 0; t < cddp_ddp_steps(ddp); t++) {
    momentum = t == 0 ? 1 : 0.5f * momentum + 1;
    w -= 0.125f * momentum;
  }
  for (i = 0; i < WEIGHTS && weights[i] == w;) i++;
  CHECK(i == WEIGHTS);
  return r;
}

typedef struct elastic_model {
  cddp_param p;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
} elastic_model;

/* The environment has been set. */
static cddp_result open_elastic(elastic_model *m, int shards) {
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_result r;
  memset(m, 0, sizeof *m);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  m->p.name = "w";
  m->p.count = WEIGHTS;
  m->p.dtype = CDDP_F32;
  desc.elastic = true;
  desc.shards = shards;
  o.lr = 0.125;
  o.momentum = 0.5;
  if ((r = cddp_init(&m->g, NULL)) != CDDP_OK) return r;
  if ((m->p.data = cddp_alloc(m->g, WEIGHTS * sizeof(float))) == NULL) return CDDP_OUT_OF_MEMORY;
  if ((r = cddp_ddp_create(&m->ddp, m->g, &m->p, 1, &desc)) != CDDP_OK) return r;
  return cddp_sgd_create(&m->optim, &m->p, 1, &o);
}

static void close_elastic(elastic_model *m, int rank) {
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  if (m->g != NULL) cddp_free(m->g, m->p.data);
  cddp_destroy(m->g);
  elastic->out[rank].ended = true;
}

/* Rank 2 dies in step 2, in which the victim's calls begin to count. Another process joins. */
static int elastic_life(int rank, void *arg) {
  elastic_model m;
  float stop = 0;
  cddp_result r;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (elastic->hosts != NULL) setenv("TEST_HOSTS", elastic->hosts, 1);
  ranks_environment(rank, FIRST, elastic->port);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (rank == JOINER) setenv("CDDP_JOIN", "1", 1);
  if (rank != elastic->victim) fault.number = 0;
  if (rank == JOINER) arm(true);
  r = open_elastic(&m, 4);
  if (r == CDDP_OK && rank < FIRST) __atomic_add_fetch(&elastic->created, 1, __ATOMIC_SEQ_CST);
  while (r == CDDP_OK && read_flag(&elastic->created) < FIRST) ranks_sleep(0.001);
  while (r == CDDP_OK && stop == 0) {
    uint64_t t = cddp_ddp_steps(m.ddp);
    if (t == 2) arm(true);
    r = elastic_step(m.ddp, m.optim, &m.p, rank == 2 && t == 2 && rank != elastic->victim);
    stop = (float)read_flag(&elastic->ended);
    if (r == CDDP_OK)
      r = cddp_all_reduce(cddp_ddp_group(m.ddp), &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_PEER_LOST) r = CDDP_OK, stop = 0;
    if (rank == JOINER) __atomic_store_n(&elastic->ended, 1, __ATOMIC_SEQ_CST);
  }
  note(&elastic->out[rank], r);
  arm(false);
  if (rank == JOINER) __atomic_store_n(&elastic->ended, 1, __ATOMIC_SEQ_CST);
  close_elastic(&m, rank);
  return 0;
}

/* Returns whether the fault struck. */
static bool run_elastic(int victim, uint32_t number) {
  int status[FIRST + 1], i, before = test_failures;
  double until = test_now() + RANKS_WITHIN(10);
  pid_t pids[FIRST + 1];
  memset(elastic->out, 0, sizeof elastic->out);
  elastic->created = elastic->ended = 0;
  elastic->victim = victim;
  elastic->port = ranks_free_port();
  fault.number = number;
  fault.struck = -1;
  __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
  for (i = 0; i < FIRST; i++) pids[i] = ranks_fork(elastic_life, i, NULL);
  while (read_flag(&elastic->created) < FIRST && test_now() < until) ranks_sleep(0.001);
  pids[JOINER] = ranks_fork(elastic_life, JOINER, NULL);
  ranks_join(pids, FIRST + 1, RANKS_WITHIN(20), status);
  for (i = 0; i <= FIRST; i++) {
    if (i == 2) continue;
    CHECK(status[i] == 0 && elastic->out[i].ended);
    if (i != victim) CHECK_IS(elastic->out[i].result, CDDP_OK);
  }
  for (i = 0; test_failures != before && i <= FIRST; i++)
    fprintf(stderr, "  hosts %s, call %u of %x: rank %d%s (struck %d): %s: %s\n",
            elastic->hosts != NULL ? elastic->hosts : "a", number, fault.calls, i,
            i == victim ? ", the victim" : "", elastic->out[i].struck,
            cddp_result_name(elastic->out[i].result), elastic->out[i].text);
  return elastic->out[victim].struck >= 0;
}

static void test_elastic(void) {
  static const char *const hosts[] = {NULL, "aab", "abc"};
  static const struct {
    unsigned calls;
    int error;
  } kinds[] = {{1u << CALL_SOCKET | 1u << CALL_ACCEPT, EMFILE},
               {1u << CALL_MMAP | 1u << CALL_STAT, ENOMEM},
               {1u << CALL_EPOLL | 1u << CALL_EVENTFD | 1u << CALL_OPEN, EMFILE},
               {1u << CALL_MALLOC | 1u << CALL_CALLOC, ENOMEM}};
  static const int victims[] = {0, 1, JOINER};
  int i, k, v, struck = 0;
  for (i = 0; i < 3; i++)
    for (k = 0; k < 4; k++)
      for (v = 0; v < 3; v++) {
        uint32_t stride = thorough ? 1 : k == 3 ? 97 : 11, most = thorough ? 400 : 60;
        uint32_t number = thorough ? 1 : 1 + (uint32_t)(i + v) % stride;
        bool more = true;
        elastic->hosts = hosts[i];
        fault.calls = kinds[k].calls;
        fault.error = kinds[k].error;
        for (; more && number < most && test_failures < 10; number += stride)
          struck += more = run_elastic(victims[v], number);
      }
  fprintf(stderr, "  %d calls failed\n", struck);
  CHECK(struck > 15);
}

/* One send of a meeting fails: that rank and its peer make a new link, and no rank ends. */
static void test_elastic_sends(void) {
  static const int victims[] = {0, 1, JOINER}, errors[] = {ECONNRESET, EPIPE};
  int k, v, i, struck = 0;
  elastic->hosts = NULL;
  fault.calls = 1u << CALL_SENDMSG;
  for (k = 0; k < (thorough ? 2 : 1); k++)
    for (v = 0; v < 3; v++) {
      uint32_t number = 1;
      bool more = true;
      fault.error = errors[k];
      for (; more && number < 40 && test_failures < 10; number++) {
        struck += more = run_elastic(victims[v], number);
        for (i = 0; i <= FIRST; i++)
          if (i != 2) CHECK_IS(elastic->out[i].result, CDDP_OK);
      }
    }
  fprintf(stderr, "  %d calls failed\n", struck);
  CHECK(struck > 10);
}

/* In step 2 one call of `victim` fails: in the program's own collective, or, if rank 3 of four dies
   in that step, in the meeting: then the victim can end. The group works again two steps later. */
static int lost_call_life(int rank, void *arg) {
  elastic_model m;
  int size = *(const int *)arg;
  float sum;
  cddp_result r;
  setenv("TEST_HOSTS", elastic->hosts, 1);
  ranks_environment(rank, size, elastic->port);
  setenv("CDDP_TIMEOUT_S", "8", 1);
  if (rank != elastic->victim) fault.number = 0;
  r = open_elastic(&m, 4);
  while (r == CDDP_OK && cddp_ddp_steps(m.ddp) < 6) {
    if (size == 4 && cddp_ddp_steps(m.ddp) == 1) arm(true);
    r = elastic_step(m.ddp, m.optim, &m.p, rank == 3 && cddp_ddp_steps(m.ddp) == 2);
    if (r != CDDP_OK) break;
    if (cddp_ddp_steps(m.ddp) == 2) arm(true);
    sum = 1;
    r = cddp_all_reduce(cddp_ddp_group(m.ddp), &sum, 1, CDDP_F32, CDDP_SUM, NULL);
    if (size == 3 || cddp_ddp_steps(m.ddp) > 3) arm(false);
    if (r == CDDP_OK) CHECK(sum >= 2 && sum <= size);
    if (r == CDDP_PEER_LOST && cddp_ddp_steps(m.ddp) < 5) r = CDDP_OK;
  }
  note(&elastic->out[rank], r);
  close_elastic(&m, rank);
  return 0;
}

/* Returns how many calls failed. */
static int run_lost_calls(int size, const char *hosts, int call, int error) {
  int status[4], i, struck = 0;
  uint32_t number;
  pid_t pids[4];
  bool more;
  fault.calls = 1u << call;
  fault.error = error;
  for (elastic->victim = 0; elastic->victim < 3; elastic->victim++)
    for (more = true, number = 1; more && number < 8 && test_failures < 10; number++) {
      memset(elastic->out, 0, sizeof elastic->out);
      elastic->hosts = hosts;
      elastic->port = ranks_free_port();
      fault.number = number;
      fault.struck = -1;
      __atomic_store_n(&fault.counted, 0, __ATOMIC_SEQ_CST);
      for (i = 0; i < size; i++) pids[i] = ranks_fork(lost_call_life, i, &size);
      ranks_join(pids, size, RANKS_WITHIN(20), status);
      for (i = 0; i < 3; i++) {
        CHECK(status[i] == 0 && elastic->out[i].ended);
        if (test_failures > 0)
          fprintf(stderr, "  %d ranks on %s, call %u of rank %d: rank %d: %s\n", size, hosts,
                  number, elastic->victim, i, elastic->out[i].text);
        if (size == 3 || i != elastic->victim) CHECK_IS(elastic->out[i].result, CDDP_OK);
      }
      struck += more = elastic->out[elastic->victim].struck >= 0;
    }
  fprintf(stderr, "  %d ranks on %s: %d calls failed\n", size, hosts, struck);
  return struck;
}

static void test_lost_calls(void) {
  CHECK(run_lost_calls(3, "aab", CALL_SENDMSG, ECONNRESET) > 1);
  CHECK(run_lost_calls(3, "abb", CALL_SENDMSG, ECONNRESET) > 1);
  CHECK(run_lost_calls(3, "abc", CALL_SENDMSG, ECONNRESET) > 4);
}

/* Who counts a living leader as lost since a connection failed reports to it when it calls. */
static void test_false_losses(void) {
  CHECK(run_lost_calls(4, "abcd", CALL_CONNECT, EHOSTUNREACH) > 5);
  CHECK(run_lost_calls(4, "aabc", CALL_CONNECT, EHOSTUNREACH) > 3);
}

/* Ranks 0 to 2 train; ranks 3 and 4 join. The network is cut into {0, 3, 4} and {1, 2} when rank 0
   has admitted both, before it sends the table. */
static int half_life(int rank, void *arg) {
  elastic_model m;
  cddp_result r;
  uint64_t t;
  (void)arg;
  halves_rank = rank;
  ranks_environment(rank, FIRST, elastic->port);
  setenv("CDDP_HOST_ID", (const char *[]){"a", "b", "c", "d", "e"}[rank], 1);
  setenv("CDDP_TIMEOUT_S", "10", 1);
  if (rank >= FIRST) setenv("CDDP_JOIN", "1", 1);
  r = open_elastic(&m, 6);
  if (r == CDDP_OK) __atomic_add_fetch(&elastic->created, 1, __ATOMIC_SEQ_CST);
  while (r == CDDP_OK && (t = cddp_ddp_steps(m.ddp)) < 30) {
    if (t == 3 && rank == 0) ranks_sleep(1); /* both joining processes ask in this time */
    r = elastic_step(m.ddp, m.optim, &m.p, false);
  }
  note(&elastic->out[rank], r);
  close_elastic(&m, rank);
  return 0;
}

static void test_halves(void) {
  int status[FIRST + 2], i;
  pid_t pids[FIRST + 2];
  double until = test_now() + RANKS_WITHIN(10);
  halves = (struct halves *)mmap(NULL, sizeof *halves, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  memset(elastic->out, 0, sizeof elastic->out);
  elastic->created = 0;
  elastic->port = ranks_free_port();
  for (i = 0; i < FIRST; i++) pids[i] = ranks_fork(half_life, i, NULL);
  while (read_flag(&elastic->created) < FIRST && test_now() < until) ranks_sleep(0.001);
  for (; i < FIRST + 2; i++) pids[i] = ranks_fork(half_life, i, NULL);
  ranks_join(pids, FIRST + 2, RANKS_WITHIN(20), status);
  CHECK(halves->cut == 1);
  for (i = 0; i < FIRST + 2; i++) {
    CHECK(status[i] == 0 && elastic->out[i].ended);
    if (test_failures > 0)
      fprintf(stderr, "  rank %d: %s %s\n", i, cddp_result_name(elastic->out[i].result),
              elastic->out[i].text);
  }
  CHECK(elastic->out[0].result != CDDP_OK);
  CHECK_IS(elastic->out[1].result, CDDP_OK);
  CHECK_IS(elastic->out[2].result, CDDP_OK);
  munmap(halves, sizeof *halves);
  halves = NULL;
}

/* --- bad input --- */

/* The call was refused with a sentence that begins with the function's name. */
#define REFUSED(call)                                                                            \
  do {                                                                                           \
    const char *text = #call;                                                                    \
    CHECK_IS(call, CDDP_INVALID_ARGUMENT);                                                       \
    CHECK(strncmp(cddp_error(), text, strcspn(text, "(")) == 0);                                 \
    CHECK(strlen(cddp_error()) > strcspn(text, "(") + 8);                                        \
  } while (0)

#define FAR (SIZE_MAX / 2) /* elements that no address space has */

static void bad_collectives(cddp_group *g, float *x, cddp_work **w) {
  const cddp_dtype no_dtype = (cddp_dtype)8, low_dtype = (cddp_dtype)-1;
  const cddp_op no_op = (cddp_op)5, low_op = (cddp_op)-1;
  REFUSED(cddp_all_reduce(NULL, x, 1, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_all_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_all_reduce(g, x, FAR, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_all_reduce(g, x, 1, no_dtype, CDDP_SUM, w));
  REFUSED(cddp_all_reduce(g, x, 1, low_dtype, CDDP_SUM, w));
  REFUSED(cddp_all_reduce(g, x, 1, CDDP_F32, no_op, w));
  REFUSED(cddp_all_reduce(g, x, 1, CDDP_F32, low_op, w));
  REFUSED(cddp_reduce(NULL, x, 1, CDDP_F32, CDDP_SUM, 0, w));
  REFUSED(cddp_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, 0, w));
  REFUSED(cddp_reduce(g, x, FAR, CDDP_F32, CDDP_SUM, 0, w));
  REFUSED(cddp_reduce(g, x, 1, CDDP_F32, CDDP_SUM, -1, w));
  REFUSED(cddp_reduce(g, x, 1, CDDP_F32, CDDP_SUM, 2, w));
  REFUSED(cddp_reduce(g, x, 1, CDDP_F32, no_op, 0, w));
  REFUSED(cddp_broadcast(NULL, x, 1, CDDP_F32, 0, w));
  REFUSED(cddp_broadcast(g, NULL, 1, CDDP_F32, 0, w));
  REFUSED(cddp_broadcast(g, x, FAR, CDDP_F32, 0, w));
  REFUSED(cddp_broadcast(g, x, 1, CDDP_F32, INT_MIN, w));
  REFUSED(cddp_broadcast(g, x, 1, CDDP_F32, INT_MAX, w));
  REFUSED(cddp_broadcast(g, x, 1, no_dtype, 0, w));
  REFUSED(cddp_all_gather(NULL, x, x, 1, CDDP_F32, w));
  REFUSED(cddp_all_gather(g, NULL, x, 1, CDDP_F32, w));
  REFUSED(cddp_all_gather(g, x, NULL, 1, CDDP_F32, w));
  REFUSED(cddp_all_gather(g, x, x, FAR / 4, CDDP_F32, w));
  REFUSED(cddp_all_gather(g, x, x, 1, no_dtype, w));
  REFUSED(cddp_gather(NULL, x, x, 1, CDDP_F32, 0, w));
  REFUSED(cddp_gather(g, NULL, x, 1, CDDP_F32, 0, w));
  REFUSED(cddp_gather(g, x, NULL, 1, CDDP_F32, cddp_rank(g), w));
  REFUSED(cddp_gather(g, x, x, 1, CDDP_F32, 2, w));
  REFUSED(cddp_gather(g, x, x, FAR, CDDP_F32, 0, w));
  REFUSED(cddp_scatter(NULL, x, x, 1, CDDP_F32, 0, w));
  REFUSED(cddp_scatter(g, NULL, x, 1, CDDP_F32, cddp_rank(g), w));
  REFUSED(cddp_scatter(g, x, NULL, 1, CDDP_F32, 0, w));
  REFUSED(cddp_scatter(g, x, x, 1, CDDP_F32, -7, w));
  REFUSED(cddp_scatter(g, x, x, FAR / 4, CDDP_F32, 0, w));
  REFUSED(cddp_reduce_scatter(NULL, x, x, 1, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_reduce_scatter(g, NULL, x, 1, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_reduce_scatter(g, x, NULL, 1, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_reduce_scatter(g, x, x, FAR / 4, CDDP_F32, CDDP_SUM, w));
  REFUSED(cddp_reduce_scatter(g, x, x, 1, CDDP_F32, no_op, w));
  REFUSED(cddp_all_to_all(NULL, x, x, 1, CDDP_F32, w));
  REFUSED(cddp_all_to_all(g, NULL, x, 1, CDDP_F32, w));
  REFUSED(cddp_all_to_all(g, x, NULL, 1, CDDP_F32, w));
  REFUSED(cddp_all_to_all(g, x, x, FAR / 4, CDDP_F32, w));
  REFUSED(cddp_barrier(NULL));
  REFUSED(cddp_wait(NULL));
}

static void bad_mail(cddp_group *g, float *x, cddp_work **w) {
  bool done = false;
  REFUSED(cddp_send(NULL, x, 1, CDDP_F32, 0, 0, w));
  REFUSED(cddp_send(g, NULL, 1, CDDP_F32, 0, 0, w));
  REFUSED(cddp_send(g, x, FAR, CDDP_F32, 0, 0, w));
  REFUSED(cddp_send(g, x, 1, (cddp_dtype)99, 0, 0, w));
  REFUSED(cddp_send(g, x, 1, CDDP_F32, -1, 0, w));
  REFUSED(cddp_send(g, x, 1, CDDP_F32, 2, 0, w));
  REFUSED(cddp_send(g, x, 1, CDDP_F32, 0, -1, w));
  REFUSED(cddp_recv(NULL, x, 1, CDDP_F32, 0, 0, w));
  REFUSED(cddp_recv(g, NULL, 1, CDDP_F32, 0, 0, w));
  REFUSED(cddp_recv(g, x, FAR, CDDP_F32, 0, 0, w));
  REFUSED(cddp_recv(g, x, 1, (cddp_dtype)-3, 0, 0, w));
  REFUSED(cddp_recv(g, x, 1, CDDP_F32, 2, 0, w));
  REFUSED(cddp_recv(g, x, 1, CDDP_F32, 0, INT_MIN, w));
  REFUSED(cddp_test(NULL, &done));
}

static void bad_groups(cddp_group *g) {
  static const int twice[] = {0, 0}, outside[] = {2}, below[] = {-1};
  cddp_group *s = (cddp_group *)(void *)&test_failures;
  REFUSED(cddp_group_split(NULL, 0, 0, &s));
  CHECK(s == NULL);
  REFUSED(cddp_group_split(g, 0, 0, NULL));
  REFUSED(cddp_group_new(NULL, twice, 1, &s));
  REFUSED(cddp_group_new(g, twice, 2, &s));
  REFUSED(cddp_group_new(g, twice, 0, &s));
  REFUSED(cddp_group_new(g, twice, -1, &s));
  REFUSED(cddp_group_new(g, NULL, 1, &s));
  REFUSED(cddp_group_new(g, outside, 1, &s));
  REFUSED(cddp_group_new(g, below, 1, &s));
  REFUSED(cddp_group_new(g, twice, 1, NULL));
  CHECK(s == NULL);
  CHECK(cddp_alloc(NULL, 10) == NULL && strncmp(cddp_error(), "cddp_alloc:", 11) == 0);
  CHECK(cddp_alloc(g, SIZE_MAX) == NULL && strncmp(cddp_error(), "cddp_alloc:", 11) == 0);
  CHECK(cddp_alloc(g, SIZE_MAX - 5000) == NULL);
  cddp_free(NULL, &s);
  cddp_free(g, NULL);
  cddp_free(g, &s); /* not from cddp_alloc */
  cddp_destroy(NULL);
  CHECK(cddp_rank(NULL) == -1 && cddp_world_size(NULL) == -1);
  CHECK(cddp_local_rank(NULL) == -1 && cddp_local_world_size(NULL) == -1);
}

/* Valid but for one thing. */
static void bad_params(cddp_group *g, float *x) {
  cddp_param good = {"w", x, NULL, 2, CDDP_F32}, p[2];
  cddp_ddp_desc d;
  cddp_ddp *ddp = (cddp_ddp *)(void *)x;
  p[0] = p[1] = good;
  memset(&d, 0, sizeof d);
  REFUSED(cddp_ddp_create(NULL, g, p, 2, NULL));
  REFUSED(cddp_ddp_create(&ddp, NULL, p, 2, NULL));
  CHECK(ddp == NULL);
  REFUSED(cddp_ddp_create(&ddp, g, NULL, 2, NULL));
  REFUSED(cddp_ddp_create(&ddp, g, p, 0, NULL));
  REFUSED(cddp_ddp_create(&ddp, g, p, -1, NULL));
  p[1].data = NULL;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, NULL));
  p[1] = good;
  p[1].dtype = CDDP_I32;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, NULL));
  p[1].dtype = (cddp_dtype)77;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, NULL));
  p[1] = good;
  p[1].count = SIZE_MAX / 2;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, NULL));
  p[1] = good;
  d.bucket_cap_mb = -1;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, &d));
  d.bucket_cap_mb = NAN;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, &d));
  d.bucket_cap_mb = 0;
  d.first_bucket_mb = -2;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, &d));
  d.first_bucket_mb = 0;
  d.buffer_count = 1;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, &d));
  d.buffer_count = -1;
  REFUSED(cddp_ddp_create(&ddp, g, p, 2, &d));
  CHECK(ddp == NULL && p[0].grad == NULL);
}

static void bad_model_calls(cddp_ddp *d, cddp_optim *s, cddp_optim *foreign) {
  double norm = 5;
  int list[4];
  REFUSED(cddp_ddp_ready(NULL, 0));
  REFUSED(cddp_ddp_ready(d, -1));
  REFUSED(cddp_ddp_ready(d, 2));
  REFUSED(cddp_ddp_wait(NULL));
  REFUSED(cddp_ddp_step(NULL, s));
  REFUSED(cddp_ddp_step(d, NULL));
  REFUSED(cddp_ddp_step(d, foreign));
  REFUSED(cddp_ddp_clip_grad_norm(NULL, 1, &norm));
  REFUSED(cddp_ddp_clip_grad_norm(d, 0, &norm));
  REFUSED(cddp_ddp_clip_grad_norm(d, -1, &norm));
  REFUSED(cddp_ddp_clip_grad_norm(d, NAN, &norm));
  CHECK(norm == 5);
  REFUSED(cddp_ddp_sync_buffers(NULL));
  REFUSED(cddp_optim_step(NULL));
  REFUSED(cddp_optim_zero_grad(NULL));
  REFUSED(cddp_optim_set_lr(NULL, 1));
  REFUSED(cddp_optim_set_lr(s, -1));
  REFUSED(cddp_optim_set_lr(s, NAN));
  REFUSED(cddp_bf16_compress_hook(NULL, NULL));
  REFUSED(cddp_fp16_compress_hook(NULL, NULL));
  CHECK(!cddp_ddp_used(NULL, 0) && !cddp_ddp_used(d, -1) && !cddp_ddp_used(d, 2));
  CHECK(cddp_ddp_bucket_count(NULL) == -1);
  CHECK(cddp_ddp_bucket_params(NULL, 0, list, 4) == -1);
  CHECK(cddp_ddp_bucket_params(d, -1, list, 4) == -1);
  CHECK(cddp_ddp_bucket_params(d, 99, list, 4) == -1);
  CHECK(cddp_ddp_bucket_params(d, 0, list, -1) > 0);
  cddp_ddp_no_sync(NULL, true);
  cddp_ddp_destroy(NULL);
  cddp_optim_destroy(NULL);
  CHECK(cddp_optim_lr(NULL) == 0);
}

static void bad_models(cddp_group *g, float *x) {
  cddp_param p[2], other[2];
  cddp_sgd_desc o;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL, *foreign = NULL;
  float weights[4] = {1, 2, 3, 4}, grads[4] = {0, 0, 0, 0};
  int i;
  (void)x;
  memset(p, 0, sizeof p);
  memset(&o, 0, sizeof o);
  for (i = 0; i < 2; i++) {
    p[i].data = weights + 2 * i;
    p[i].count = 2;
    other[i] = p[i];
    other[i].grad = grads + 2 * i;
  }
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  REFUSED(cddp_sgd_create(NULL, p, 2, &o));
  REFUSED(cddp_sgd_create(&s, NULL, 2, &o));
  REFUSED(cddp_sgd_create(&s, p, -1, &o));
  REFUSED(cddp_sgd_create(&s, p, 2, NULL));
  o.lr = -1;
  REFUSED(cddp_sgd_create(&s, p, 2, &o));
  o.lr = 0.5;
  o.momentum = -1;
  REFUSED(cddp_sgd_create(&s, p, 2, &o));
  o.momentum = 0;
  o.nesterov = true;
  REFUSED(cddp_sgd_create(&s, p, 2, &o));
  o.nesterov = false;
  CHECK_OK(cddp_sgd_create(&s, p, 2, &o));
  CHECK_OK(cddp_sgd_create(&foreign, other, 2, &o));
  bad_model_calls(d, s, foreign);
  CHECK_OK(cddp_ddp_ready(d, 0));
  cddp_ddp_no_sync(d, true);
  REFUSED(cddp_ddp_step(d, s));
  cddp_ddp_no_sync(d, false);
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK_OK(cddp_ddp_step(d, s)); /* after all that */
  CHECK(weights[0] == 1 && weights[3] == 4);
  REFUSED(cddp_ddp_wait(d)); /* without ready */
  cddp_optim_destroy(foreign);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
}

static int bad_calls(cddp_group *g, void *arg) {
  float x[4] = {1, 2, 3, 4};
  cddp_work *w = NULL;
  int before = test_failures;
  (void)arg;
  bad_collectives(g, x, NULL);
  bad_collectives(g, x, &w);
  bad_mail(g, x, NULL);
  bad_mail(g, x, &w);
  CHECK(w == NULL);
  bad_groups(g);
  bad_params(g, x);
  bad_models(g, x);
  CHECK(x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4);
  CHECK_OK(cddp_all_reduce(g, x, 4, CDDP_F32, CDDP_SUM, NULL)); /* and the group goes on */
  CHECK(x[0] == 2 && x[3] == 8);
  return test_failures != before;
}

/* Another host's list of the ranks that have arrived, cut where it was too long. */
static void test_cut_list(void) {
  cddp_group_desc d;
  cddp_group *g = NULL;
  memset(&d, 0, sizeof d);
  d.world_size = 1;
  CHECK_OK(cddp_init(&g, &d));
  cddp__record_arrivals(g, "7 1-3, ...");
  CHECK_EQ(cddp__load32(cddp__remote_arrival_of(g, 0)), 0);
  cddp__record_arrivals(g, "7 0, ...");
  CHECK_EQ(cddp__load32(cddp__remote_arrival_of(g, 0)), 7);
  cddp_destroy(g);
}

static void test_bad_calls(void) {
  CHECK_OK(ranks_run(bad_calls, NULL, 2, true));
  CHECK_OK(ranks_run(bad_calls, NULL, 2, false));
}

static void test_bad_starts(void) {
  cddp_group *g = (cddp_group *)(void *)&test_failures;
  cddp_group_desc d;
  cddp_sampler_desc sd;
  cddp_sampler s;
  memset(&d, 0, sizeof d);
  memset(&sd, 0, sizeof sd);
  REFUSED(cddp_init(NULL, &d));
  d.world_size = -1;
  REFUSED(cddp_init(&g, &d));
  CHECK(g == NULL);
  d.world_size = INT_MAX;
  REFUSED(cddp_init(&g, &d));
  d.world_size = 2;
  d.rank = 2;
  REFUSED(cddp_init(&g, &d));
  d.rank = -1;
  REFUSED(cddp_init(&g, &d));
  d.rank = d.world_size = 0;
  d.timeout_s = -1;
  REFUSED(cddp_init(&g, &d));
  d.timeout_s = NAN;
  REFUSED(cddp_init(&g, &d));
  d.timeout_s = 0;
  d.init_method = "http://x";
  REFUSED(cddp_init(&g, &d));
  REFUSED(cddp_spawn(NULL, NULL, 2));
  REFUSED(cddp_spawn(do_nothing, NULL, 0));
  REFUSED(cddp_spawn(do_nothing, NULL, INT_MAX));
  REFUSED(cddp_run_threads(NULL, NULL, 2));
  REFUSED(cddp_run_threads(thread_life, NULL, -2));
  REFUSED(cddp_run_threads(thread_life, NULL, INT_MAX));
  REFUSED(cddp_sampler_init(NULL, &sd));
  REFUSED(cddp_sampler_init(&s, NULL));
  sd.world_size = -1;
  REFUSED(cddp_sampler_init(&s, &sd));
  sd.world_size = 2;
  sd.rank = 2;
  REFUSED(cddp_sampler_init(&s, &sd));
  sd.rank = 0;
  sd.dataset_size = SIZE_MAX;
  REFUSED(cddp_sampler_init(&s, &sd));
  CHECK(cddp_sampler_size(&s) == 0 && !cddp_sampler_next(&s, NULL));
  cddp_sampler_set_epoch(NULL, 1);
  cddp_sampler_destroy(NULL);
  CHECK(!cddp_sampler_next(NULL, NULL));
  CHECK(cddp_result_name((cddp_result)999) != NULL && cddp_result_text((cddp_result)-5) != NULL);
  CHECK(cddp_dtype_size((cddp_dtype)-1) == 0 && cddp_dtype_size((cddp_dtype)8) == 0);
}

int main(int argc, char **argv) {
  thorough = argc > 1 && strcmp(argv[1], "--thorough") == 0;
  job = (struct job *)ranks_shared(sizeof *job);
  elastic = (elastic_run *)ranks_shared(sizeof *elastic);
  RUN(test_memory_init);
  RUN(test_memory_collectives);
  RUN(test_memory_mail);
  RUN(test_memory_groups);
  RUN(test_memory_kept);
  RUN(test_memory_models);
  RUN(test_memory_threads);
  RUN(test_memory_spawn);
  RUN(test_memory_sampler);
  RUN(test_interrupted);
  RUN(test_no_buffers);
  RUN(test_accepted_later);
  RUN(test_tiny);
  RUN(test_descriptors);
  RUN(test_resets);
  RUN(test_files);
  RUN(test_checkpoint);
  RUN(test_states_agree);
  RUN(test_elastic);
  RUN(test_elastic_sends);
  RUN(test_lost_calls);
  RUN(test_false_losses);
  RUN(test_halves);
  RUN(test_cut_list);
  RUN(test_bad_calls);
  RUN(test_bad_starts);
  return TEST_END();
}
