/* store.c - Store: the TCP server and client, which speak PyTorch's protocol, and the store in a
   file.

   Bytes on the wire must be those of PyTorch's TCPStore. Clients are many, slow, silent, hostile,
   without the secret, or killed in the middle; servers are late, stopped, foreign or leave: every
   call must end with the right answer, or with an error in time. Files are shared by processes that
   die while they write. This file includes the implementation: it speaks for one side of a
   connection, and replaces some system calls.

   Build and run: cc -std=c11 -O1 -g tests/rooms/store.c -o store -lpthread -lm */
#define _GNU_SOURCE
#include <netdb.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

static ssize_t faulty_send(int fd, const void *p, size_t n, int flags);
static ssize_t faulty_recv(int fd, void *p, size_t n, int flags);
static ssize_t faulty_sendmsg(int fd, const struct msghdr *m, int flags);
static ssize_t faulty_recvmsg(int fd, struct msghdr *m, int flags);
static ssize_t faulty_pread(int fd, void *p, size_t n, off_t offset);
static ssize_t faulty_pwrite(int fd, const void *p, size_t n, off_t offset);
static int raced_listen(int fd, int backlog);
static int (*const real_listen)(int fd, int backlog) = listen;
static int named_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                             struct addrinfo **list);
#define send(fd, p, n, flags) faulty_send(fd, p, n, flags)
#define recv(fd, p, n, flags) faulty_recv(fd, p, n, flags)
#define sendmsg(fd, m, flags) faulty_sendmsg(fd, m, flags)
#define recvmsg(fd, m, flags) faulty_recvmsg(fd, m, flags)
#define pread(fd, p, n, offset) faulty_pread(fd, p, n, offset)
#define pwrite(fd, p, n, offset) faulty_pwrite(fd, p, n, offset)
#define listen raced_listen
#define getaddrinfo named_getaddrinfo
#define CDDP__GREETING_S 0.6
#define CDDP__COMMAND_S 0.8
#define CDDP__STORE_MEMORY ((size_t)72 << 20)

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#undef send
#undef recv
#undef sendmsg
#undef recvmsg
#undef pread
#undef pwrite
#undef getaddrinfo

#include "../test.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* --- faults --------------------------------------------------------------------------------- */

enum { FAULT_NONE, FAULT_TINY, FAULT_AT, FAULT_FILE };
static cddp__atomic_u32 fault_kind, fault_calls;
static cddp__atomic_u32 fault_at, fault_errno; /* FAULT_AT: which call, and what it gets */

/* -1 with errno, or the number of bytes to do. FAULT_FILE is FAULT_AT among the calls on files. */
static ssize_t fault(size_t n, bool file) {
  uint32_t kind = cddp__load32(&fault_kind), call;
  if (kind == FAULT_FILE && !file) return (ssize_t)n;
  call = cddp__add32(&fault_calls, 1);
  switch (kind) {
  case FAULT_TINY: /* one byte at a time, after EINTR and EAGAIN */
    if (call % 3 == 2) return n < 1 ? (ssize_t)n : 1;
    errno = call % 3 == 0 ? EINTR : EAGAIN;
    return -1;
  case FAULT_AT:
  case FAULT_FILE:
    if (call != cddp__load32(&fault_at)) return (ssize_t)n;
    errno = (int)cddp__load32(&fault_errno);
    return -1;
  default:
    return (ssize_t)n;
  }
}

/* As Linux does it to two processes that listen at one moment, so many times. */
static int races;
static int raced_listen(int fd, int backlog) {
  if (races == 0) return real_listen(fd, backlog);
  races--;
  errno = EADDRINUSE;
  return -1;
}

/* Debian's /etc/hosts gives the host's own name this address. */
static int named_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                             struct addrinfo **list) {
  return getaddrinfo(strcmp(host, "own.invalid") == 0 ? "127.0.1.1" : host, service, hints, list);
}

static ssize_t faulty_send(int fd, const void *p, size_t n, int flags) {
  ssize_t take = fault(n, false);
  return take < 0 ? take : send(fd, p, (size_t)take, flags);
}
static ssize_t faulty_recv(int fd, void *p, size_t n, int flags) {
  ssize_t take = fault(n, false);
  return take < 0 ? take : recv(fd, p, (size_t)take, flags);
}

/* The message's first part, cut to what the fault allows; without a fault all of it. */
static struct msghdr cut(const struct msghdr *m, struct iovec *first, ssize_t take) {
  struct msghdr part = *m;
  *first = m->msg_iov[0];
  if ((size_t)take == first->iov_len) return part;
  first->iov_len = (size_t)take;
  part.msg_iov = first;
  part.msg_iovlen = 1;
  return part;
}
static ssize_t faulty_sendmsg(int fd, const struct msghdr *m, int flags) {
  ssize_t take = fault(m->msg_iov[0].iov_len, false);
  struct iovec first;
  struct msghdr part = cut(m, &first, take < 0 ? 0 : take);
  return take < 0 ? take : sendmsg(fd, &part, flags);
}
static ssize_t faulty_recvmsg(int fd, struct msghdr *m, int flags) {
  ssize_t take = fault(m->msg_iov[0].iov_len, false), n;
  struct iovec first;
  struct msghdr part = cut(m, &first, take < 0 ? 0 : take);
  if (take < 0) return take;
  n = recvmsg(fd, &part, flags);
  m->msg_controllen = part.msg_controllen;
  return n;
}
static bool file_fault(ssize_t *take) { /* files know no EAGAIN */
  if (*take < 0 && errno == EAGAIN) errno = EINTR;
  return *take < 0;
}
static ssize_t faulty_pread(int fd, void *p, size_t n, off_t offset) {
  ssize_t take = fault(n, true);
  return file_fault(&take) ? take : pread(fd, p, (size_t)take, offset);
}
static ssize_t faulty_pwrite(int fd, const void *p, size_t n, off_t offset) {
  ssize_t take = fault(n, true);
  return file_fault(&take) ? take : pwrite(fd, p, (size_t)take, offset);
}

static void set_fault(uint32_t kind, uint32_t at, int error) {
  cddp__store32(&fault_errno, (uint32_t)error);
  cddp__store32(&fault_at, at);
  cddp__store32(&fault_calls, 0);
  cddp__store32(&fault_kind, kind);
}

/* --- helpers -------------------------------------------------------------------------------- */

static int open_descriptors(void) {
  DIR *d = opendir("/proc/self/fd");
  int n = 0;
  while (readdir(d) != NULL) n++;
  closedir(d);
  return n;
}

static bool error_says(const char *text) {
  bool found = strstr(cddp_error(), text) != NULL;
  if (!found) fprintf(stderr, "'%s' is not in: %s\n", text, cddp_error());
  return found;
}

/* A store has an init_method, no variables. */
static bool names_variables(void) { return strstr(cddp_error(), "MASTER_") != NULL; }

static cddp_store *serve(const char *secret) {
  cddp_store_desc d;
  cddp_store *s = NULL;
  memset(&d, 0, sizeof d);
  d.init_method = "tcp://127.0.0.1:0";
  d.is_server = true;
  d.timeout_s = 20;
  d.secret = secret;
  CHECK_OK(cddp_store_create(&s, &d));
  return s;
}

static cddp_result join(cddp_store **s, int port, const char *secret, double timeout_s) {
  char url[64];
  cddp_store_desc d;
  memset(&d, 0, sizeof d);
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  d.init_method = url;
  d.timeout_s = timeout_s;
  d.secret = secret;
  return cddp_store_create(s, &d);
}

static char file_path[256], file_url[300];

static void new_file_path(void) {
  const char *dir = getenv("TMPDIR");
  static int number;
  snprintf(file_path, sizeof file_path, "%s/cddp-store-%d-%d", dir != NULL ? dir : "/tmp",
           (int)getpid(), number++);
  snprintf(file_url, sizeof file_url, "file://%s", file_path);
}

static cddp_result open_file(cddp_store **s, double timeout_s) {
  cddp_store_desc d;
  memset(&d, 0, sizeof d);
  d.init_method = file_url;
  d.timeout_s = timeout_s;
  return cddp_store_create(s, &d);
}

static int raw_connect(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct timeval t;
  t.tv_sec = 10;
  t.tv_usec = 0;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  CHECK(connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
  return fd;
}

static size_t from_hex(const char *hex, unsigned char *out) { /* "01 7..": .. = seven zeros */
  size_t n = 0;
  while (*hex != 0) {
    unsigned v;
    if (*hex == ' ' || *hex == '|') {
      hex++;
    } else if (hex[0] == '.') {
      memset(out + n, 0, 7);
      n += 7;
      hex += 2;
    } else {
      sscanf(hex, "%2x", &v);
      out[n++] = (unsigned char)v;
      hex += 2;
    }
  }
  return n;
}

/* Sends the bytes and compares the answer. */
static void talk(int fd, const char *request, const char *answer) {
  unsigned char out[512], want[512], got[512];
  size_t n = from_hex(request, out), m = from_hex(answer, want);
  CHECK_EQ(send(fd, out, n, MSG_NOSIGNAL), n);
  if (m == 0) return;
  CHECK_EQ(recv(fd, got, m, MSG_WAITALL), m);
  CHECK(memcmp(got, want, m) == 0);
}

/* Whether the other side ends the connection within `seconds`. */
static bool hangs_up(int fd, double seconds) {
  double end = test_now() + seconds;
  char bytes[4096];
  while (test_now() < end) {
    struct pollfd p;
    p.fd = fd;
    p.events = POLLIN;
    p.revents = 0;
    if (poll(&p, 1, 20) > 0 && recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) <= 0) return true;
  }
  return false;
}

/* --- pure ----------------------------------------------------------------------------------- */

static void check_digest(const unsigned char *got, const char *hex) {
  unsigned char want[32];
  CHECK_EQ(from_hex(hex, want), 32);
  CHECK(memcmp(got, want, 32) == 0);
}

static void test_hash(void) { /* RFC 7693, appendix B, and Python's hashlib.blake2s */
  unsigned char d[32], key[32], data[1000];
  size_t i;
  for (i = 0; i < sizeof key; i++) key[i] = (unsigned char)i;
  memset(data, 0xaa, sizeof data);
  cddp__blake2s(NULL, 0, "abc", 3, d);
  check_digest(d, "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982");
  cddp__blake2s(NULL, 0, NULL, 0, d);
  check_digest(d, "69217a3079908094e11121d042354a7c1f55b6482ca1a51e1b250dfd1ed0eef9");
  cddp__blake2s(key, 32, NULL, 0, d);
  check_digest(d, "48a8997da407876b3d79c0d92325ad3b89cbb754d86ab71aee047ad345fd2c49");
  cddp__blake2s(key, 32, data, 64, d);
  check_digest(d, "5c10bdf265ed621c6d0e0b86b2380d0d4293ff8a36f17295c50bb6c0d5082ad6");
  cddp__blake2s(key, 32, data, 65, d);
  check_digest(d, "a859c9556c258fea1471538b7f1919427c6ab82b4592e25c2434f08a3f790157");
  cddp__blake2s(key, 7, data, 1000, d);
  check_digest(d, "0962c3a44fcd335f981ae73d05e9dc8495bed7d86bde345a02005c75c6530caf");
  cddp__mac("sesame", "label", data, 100, d); /* MAC(MAC(hash of secret, data), label) */
  check_digest(d, "46b8fc48ee2bedd645acd7d395963312db0cf5525cf797ce5bd48f1efb7dc05a");
  CHECK(cddp__same_bytes("abc", "abc", 3) && !cddp__same_bytes("abc", "abd", 3));
  CHECK(!cddp__same_bytes("xbc", "abc", 3) && cddp__same_bytes("x", "y", 0));
}

static void check_host_port(const char *text, const char *host, int port) {
  char got[256];
  int p = -1;
  CHECK_OK(cddp__host_port(text, got, &p));
  CHECK(strcmp(got, host) == 0);
  CHECK_EQ(p, port);
}

static void test_host_port(void) {
  static const char *const bad[] = {
      "",      "host",   ":1",  "host:", "host:x", "h:65536", "h:-1", "::1:2",
      "[::1]", "[::1]2", "[:1", "h: 1",  "[]:1",   "h:1 ",    "h:+1", "h:99999999999999999999"};
  char host[256], longest[300];
  size_t i;
  int port;
  check_host_port("localhost:29500", "localhost", 29500);
  check_host_port("10.0.0.1:0", "10.0.0.1", 0);
  check_host_port("[::1]:65535", "::1", 65535);
  for (i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK_IS(cddp__host_port(bad[i], host, &port), CDDP_INVALID_ARGUMENT);
  memset(longest, 'h', sizeof longest);
  memcpy(longest + 256, ":12", 4);
  CHECK_IS(cddp__host_port(longest, host, &port), CDDP_INVALID_ARGUMENT);
}

static void test_printable(void) {
  static const char *const texts[][2] = {{"", ""},
                                         {"rank 1 failed", "rank 1 failed"},
                                         {"\033[31mred\r\n\007\177", "\\x1b[31mred\\r\\n\\a\\x7f"},
                                         {"na\303\257ve \302\265s", "na\303\257ve \302\265s"},
                                         {"\302\233[2J\302", "\\x9b[2J\\xc2"}};
  size_t i;
  for (i = 0; i < sizeof texts / sizeof *texts; i++) {
    cddp__fail(CDDP_IO, "%s", texts[i][0]);
    CHECK(strcmp(cddp_error(), texts[i][1]) == 0);
  }
}

static void test_numbers(void) {
  static const struct {
    const char *text;
    int64_t value;
    bool ok;
  } t[] = {{"0", 0, true},
           {"-1", -1, true},
           {"+7", 7, true},
           {"9223372036854775807", INT64_MAX, true},
           {"-9223372036854775808", INT64_MIN, true},
           {"9223372036854775808", 0, false},
           {"-9223372036854775809", 0, false},
           {"", 0, false},
           {"-", 0, false},
           {"1x", 0, false},
           {" 1", 0, false},
           {"99999999999999999999", 0, false},
           {"18446744073709551616", 0, false}};
  cddp_store *s = serve(NULL);
  size_t i;
  for (i = 0; i < sizeof t / sizeof *t; i++) {
    int64_t v = 0;
    bool ok;
    CHECK_OK(cddp_store_set(s, "n", t[i].text, strlen(t[i].text)));
    ok = cddp_store_add(s, "n", 0, &v) == CDDP_OK;
    CHECK(ok == t[i].ok && (!ok || v == t[i].value));
  }
  CHECK_OK(cddp_store_set(s, "n", "1\0", 2));
  CHECK(cddp_store_add(s, "n", 0, NULL) != CDDP_OK);
  cddp_store_destroy(s);
}

static void test_frames(void) {
  static const char *const whole[] = {"00 CE F7 85 3C",
                                      "01 02.. 2F 6B 03.. 76 61 6C",
                                      "06 01.. 02.. 2F 6B",
                                      "04 05.. 69 6E 69 74 2F 01..",
                                      "02 01.. 2F 00.. 01.. 31",
                                      "0C",
                                      "0D 01 02 03 04",
                                      "0B 02.. 01.. 61 00.. 01.. 62 01.. 31",
                                      "06 00.."};
  static const char *const bad[] = {"0E",
                                    "13",
                                    "FF",
                                    "01 01 20 00 00 00 00 00 00",         /* a key of 8193 bytes */
                                    "01 01.. 61 01 00 80 00 00 00 00 00", /* a value of 8 MiB + 1 */
                                    "01 FF FF FF FF FF FF FF FF",
                                    "06 01 00 02 00 00 00 00 00",
                                    "06 FF FF FF FF FF FF FF FF"};
  unsigned char bytes[512];
  size_t i, n, cut;
  unsigned seed = 1;
  for (i = 0; i < sizeof whole / sizeof *whole; i++) {
    cddp__parser slow;
    n = from_hex(whole[i], bytes);
    memset(&slow, 0, sizeof slow);
    for (cut = 0; cut <= n; cut++) { /* each prefix, at once and byte by byte */
      unsigned char *exact = (unsigned char *)malloc(cut + 1);
      cddp__parser f;
      memset(&f, 0, sizeof f);
      memcpy(exact, bytes, cut);
      CHECK_EQ(cddp__parser_scan(&f, exact, cut),
               cut == n ? CDDP__PARSE_COMPLETE : CDDP__PARSE_PARTIAL);
      CHECK_EQ(cddp__parser_scan(&slow, exact, cut),
               cut == n ? CDDP__PARSE_COMPLETE : CDDP__PARSE_PARTIAL);
      if (cut == n) CHECK(f.end == n && slow.end == n);
      free(exact);
    }
  }
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    cddp__parser f;
    memset(&f, 0, sizeof f);
    n = from_hex(bad[i], bytes);
    CHECK_EQ(cddp__parser_scan(&f, bytes, n), CDDP__PARSE_INVALID);
  }
  for (i = 0; i < 20000; i++) { /* nothing is read behind the end: the sanitizer says */
    unsigned char *exact;
    cddp__parser f;
    memset(&f, 0, sizeof f);
    n = (size_t)rand_r(&seed) % 64;
    exact = (unsigned char *)malloc(n + 1);
    for (cut = 0; cut < n; cut++)
      exact[cut] = (unsigned char)(rand_r(&seed) % 4 ? 0 : rand_r(&seed) % 20);
    if (cddp__parser_scan(&f, exact, n) == CDDP__PARSE_COMPLETE) CHECK(f.end <= n);
    free(exact);
  }
}

/* --- the wire ------------------------------------------------------------------------------- */

static void test_golden_bytes(void) {
  cddp_store *s = serve(NULL);
  int fd = raw_connect(cddp_store_port(s)), other = raw_connect(cddp_store_port(s)), i;
  static const unsigned char set[] = {1,   2, 0, 0, 0, 0, 0, 0, 0, '/',
                                      'z', 1, 0, 0, 0, 0, 0, 0, 0, '!'};
  char value[8];
  size_t size = 0;
  talk(fd, "00 CE F7 85 3C | 0D 01 02 03 04", "01 02 03 04");
  talk(other, "00 CE F7 85 3C", "");
  talk(fd, "01 | 02.. 2F 6B | 03.. 76 61 6C", "");     /* SET */
  talk(fd, "06 | 01.. | 02.. 2F 6B", "00");            /* WAIT */
  talk(fd, "03 | 02.. 2F 6B", "03.. 76 61 6C");        /* GET */
  talk(fd, "03 | 02.. 2F 6E", "00..");                 /* GET of a missing key */
  talk(fd, "04 | 05.. 69 6E 69 74 2F | 01..", "01.."); /* ADD */
  talk(fd, "04 | 05.. 69 6E 69 74 2F | FE FF FF FF FF FF FF FF", "FF FF FF FF FF FF FF FF");
  talk(fd, "03 | 05.. 69 6E 69 74 2F", "02.. 2D 31");                     /* decimal text */
  talk(fd, "02 | 03.. 2F 63 73 | 00.. | 03.. 6F 6E 65", "03.. 6F 6E 65"); /* COMPARE_SET */
  talk(fd, "02 | 03.. 2F 63 73 | 01.. 78 | 03.. 74 77 6F", "03.. 6F 6E 65");
  talk(fd, "02 | 03.. 2F 6E 6F | 01.. 78 | 03.. 74 77 6F",
       "01.. 78");                                          /* absent, not expected to be */
  talk(fd, "05 | 02.. | 02.. 2F 6B | 03.. 2F 6E 6F", "01"); /* CHECK */
  talk(fd, "05 | 01.. | 02.. 2F 6B", "00");
  talk(fd, "07", "03..");                                                  /* GETNUMKEYS */
  talk(fd, "0B | 02.. | 02.. 2F 61 | 01.. 41 | 02.. 2F 62 | 01.. 42", ""); /* MULTI_SET */
  talk(fd, "0A | 03.. | 02.. 2F 61 | 02.. 2F 63 | 02.. 2F 62",
       "01.. 41 00.. 01.. 42");                                             /* MULTI_GET */
  talk(fd, "09 | 02.. 2F 61 | 02.. 78 79 | 09 | 02.. 2F 61 | 01.. 7A", ""); /* APPEND */
  talk(fd, "03 | 02.. 2F 61", "04.. 41 78 79 7A");
  talk(fd, "08 | 02.. 2F 61", "01.."); /* DELETE_KEY */
  talk(fd, "08 | 02.. 2F 61", "00..");
  talk(fd, "08 | 02.. 2F 62 | 08 | 03.. 2F 63 73 | 08 | 05.. 69 6E 69 74 2F", "01.. 01.. 01..");
  talk(fd, "06 | 00..", "00");       /* WAIT for nothing */
  talk(fd, "0C", "01");              /* CANCEL_WAIT */
  talk(fd, "06 | 01.. | 02.. 2F 77 | 0C", "01");
  talk(fd, "06 | 02.. | 02.. 2F 77 | 02.. 2F 78", "");
  talk(fd, "0D 05 06 07 08", ""); /* stays behind the wait */
  talk(other, "01 | 02.. 2F 77 | 00..", "");
  talk(other, "02 | 02.. 2F 78 | 00.. | 01.. 31", "01.. 31"); /* COMPARE_SET wakes */
  talk(fd, "", "00 05 06 07 08");
  talk(fd, "06 | 02.. | 02.. 2F 71 | 02.. 2F 72", "");        /* one key after the other */
  cddp__sleep(0.1);
  talk(other, "01 | 02.. 2F 71 | 00.. | 08 | 02.. 2F 71", "01..");
  talk(other, "09 | 02.. 2F 72 | 01.. 31 | 08 | 02.. 2F 72", "01.."); /* APPEND, gone again */
  talk(fd, "", "00");
  for (i = 0; i < (int)sizeof set; i++) {      /* any segmentation */
    CHECK_EQ(send(other, set + i, 1, MSG_NOSIGNAL), 1);
    cddp__sleep(0.001);
  }
  CHECK_OK(cddp_store_get(s, "z", value, sizeof value, &size)); /* the leading slash is cddp's */
  CHECK(size == 1 && value[0] == '!');
  CHECK_OK(cddp_store_set(s, "y", "Y", 1));
  talk(other, "06 | 01.. | 02.. 2F 79 | 03 | 02.. 2F 79", "00 01.. 59");
  close(fd);
  close(other);
  cddp_store_destroy(s);
}

/* --- operations ----------------------------------------------------------------------------- */

/* Each operation, on a store that is empty but for the keys of other prefixes. */
static void exercise(cddp_store *s, const char *p) {
  char a[32], b[32], n[32], c[32], value[64];
  unsigned char *big = (unsigned char *)malloc(300000), *back = (unsigned char *)malloc(300000);
  const char *keys[3];
  size_t size = 99, i;
  int64_t total = 0, before = 0, count = 0;
  bool yes = false;
  snprintf(a, sizeof a, "%s-a", p);
  snprintf(b, sizeof b, "%s-b", p);
  snprintf(n, sizeof n, "%s-n", p);
  snprintf(c, sizeof c, "%s-c", p);
  keys[0] = a;
  keys[1] = b;
  keys[2] = n;
  CHECK_OK(cddp_store_num_keys(s, &before));
  CHECK_OK(cddp_store_check(s, keys, 1, &yes));
  CHECK(!yes);
  CHECK_OK(cddp_store_set(s, a, "one\0two", 7));
  CHECK_OK(cddp_store_get(s, a, value, sizeof value, &size));
  CHECK(size == 7 && memcmp(value, "one\0two", 7) == 0);
  CHECK_OK(cddp_store_set(s, a, NULL, 0));
  CHECK_OK(cddp_store_get(s, a, value, sizeof value, &size));
  CHECK_EQ(size, 0);
  for (i = 0; i < 300000; i++) big[i] = (unsigned char)(i * 7 + i / 251);
  CHECK_OK(cddp_store_set(s, b, big, 300000));
  CHECK_OK(cddp_store_get(s, b, NULL, 0, &size));
  CHECK_EQ(size, 300000);
  CHECK_IS(cddp_store_get(s, b, back, 299999, &size), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(size, 300000);
  CHECK_OK(cddp_store_get(s, b, back, 300000, &size));
  CHECK(size == 300000 && memcmp(big, back, size) == 0);
  CHECK_OK(cddp_store_add(s, n, 5, &total));
  CHECK_EQ(total, 5);
  CHECK_OK(cddp_store_add(s, n, -7, NULL));
  CHECK_OK(cddp_store_add(s, n, 0, &total));
  CHECK_EQ(total, -2);
  CHECK_OK(cddp_store_get(s, n, value, sizeof value, &size));
  CHECK(size == 2 && memcmp(value, "-2", 2) == 0);
  CHECK_OK(cddp_store_check(s, keys, 3, &yes));
  CHECK(yes);
  CHECK_OK(cddp_store_wait(s, keys, 3, 1));
  CHECK_OK(cddp_store_wait(s, NULL, 0, 0));
  CHECK_OK(cddp_store_compare_set(s, c, "x", 1, "y", 1, value, sizeof value, &size, &yes));
  CHECK(!yes && size == 1 && value[0] == 'x'); /* absent: what was expected comes back */
  CHECK_OK(cddp_store_compare_set(s, c, NULL, 0, "first", 5, value, sizeof value, &size, &yes));
  CHECK(yes && size == 5 && memcmp(value, "first", 5) == 0);
  CHECK_OK(cddp_store_compare_set(s, c, NULL, 0, "second", 6, value, sizeof value, &size, &yes));
  CHECK(!yes && size == 5 && memcmp(value, "first", 5) == 0);
  CHECK_OK(cddp_store_compare_set(s, c, "first", 5, "third", 5, NULL, 0, &size, &yes));
  CHECK(yes && size == 5);
  CHECK_OK(cddp_store_num_keys(s, &count));
  CHECK_EQ(count - before, 4);
  CHECK_OK(cddp_store_delete(s, b, &yes));
  CHECK(yes);
  CHECK_OK(cddp_store_delete(s, b, &yes));
  CHECK(!yes);
  CHECK_IS(cddp_store_wait(s, keys, 3, 0.03), CDDP_TIMEOUT);
  CHECK(error_says(b) && error_says("2 of 3"));
  CHECK_OK(cddp_store_delete(s, a, NULL));
  CHECK_OK(cddp_store_delete(s, n, NULL));
  CHECK_OK(cddp_store_delete(s, c, NULL));
  CHECK_OK(cddp_store_num_keys(s, &count));
  CHECK_EQ(count, before);
  free(big);
  free(back);
}

static void test_operations(void) {
  cddp_store *s = serve(NULL), *c = NULL, *f = NULL, *g = NULL;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  CHECK_EQ(cddp_store_port(c), cddp_store_port(s));
  exercise(s, "server");
  exercise(c, "client");
  cddp_store_destroy(c);
  cddp_store_destroy(s);
  new_file_path();
  CHECK_OK(open_file(&f, 5));
  CHECK_OK(open_file(&g, 5));
  CHECK_EQ(cddp_store_port(f), 0);
  exercise(f, "f");
  exercise(g, "g");
  cddp_store_destroy(g);
  CHECK_EQ(access(file_path, F_OK), 0);
  cddp_store_destroy(f);
  CHECK(access(file_path, F_OK) != 0);
}

static void test_largest(void) {
  unsigned char *big = (unsigned char *)calloc(CDDP__VALUE_MAX + 1, 1);
  char *key = (char *)malloc(CDDP__KEY_MAX + 1);
  cddp_store *s[2];
  size_t size = 0;
  int i;
  memset(key, 'k', CDDP__KEY_MAX);
  new_file_path();
  s[0] = serve(NULL);
  CHECK_OK(open_file(&s[1], 5));
  big[CDDP__VALUE_MAX - 1] = 7;
  for (i = 0; i < 2; i++) {
    key[CDDP__KEY_MAX] = 0;
    CHECK_IS(cddp_store_set(s[i], key, "", 0), CDDP_INVALID_ARGUMENT);
    key[CDDP__KEY_MAX - 1] = 0;
    CHECK_IS(cddp_store_set(s[i], key, big, CDDP__VALUE_MAX + 1), CDDP_INVALID_ARGUMENT);
    CHECK_OK(cddp_store_set(s[i], key, big, CDDP__VALUE_MAX));
    big[CDDP__VALUE_MAX - 1] = 0;
    CHECK_OK(cddp_store_get(s[i], key, big, CDDP__VALUE_MAX, &size));
    CHECK(size == CDDP__VALUE_MAX && big[CDDP__VALUE_MAX - 1] == 7);
    cddp_store_destroy(s[i]);
    key[CDDP__KEY_MAX - 1] = 'k';
  }
  free(big);
  free(key);
}

static void test_arguments(void) {
  cddp_store *s = serve(NULL), *none = s;
  cddp_store_desc d;
  const char *keys[2] = {"a", NULL};
  int64_t n;
  size_t size;
  bool yes;
  char value[4], where[64];
  memset(&d, 0, sizeof d);
  CHECK_IS(cddp_store_create(NULL, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_create(&none, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(none == NULL);
  CHECK_IS(cddp_store_create(&none, &d), CDDP_INVALID_ARGUMENT);
  CHECK(error_says("init_method"));
  d.timeout_s = -1;
  d.init_method = "tcp://127.0.0.1:1";
  CHECK_IS(cddp_store_create(&none, &d), CDDP_INVALID_ARGUMENT);
  d.timeout_s = 1;
  d.init_method = "tcp://127.0.0.1:0";
  CHECK_IS(cddp_store_create(&none, &d), CDDP_INVALID_ARGUMENT);
  d.init_method = "udp://127.0.0.1:1";
  CHECK_IS(cddp_store_create(&none, &d), CDDP_INVALID_ARGUMENT);
  d.init_method = "file://relative";
  CHECK_IS(cddp_store_create(&none, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_set(NULL, "a", "", 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_set(s, NULL, "", 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_set(s, "a", NULL, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_get(s, "a", NULL, 1, &size), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_get(s, "a", value, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_add(s, NULL, 1, &n), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_wait(s, keys, 2, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_wait(s, NULL, 1, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_wait(s, keys, -1, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_wait(s, keys, 1, -1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_check(s, keys, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_num_keys(s, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_compare_set(s, "a", NULL, 1, "", 0, value, 4, &size, &yes),
           CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_compare_set(s, "a", "", 0, "", 0, value, 4, &size, NULL),
           CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_store_delete(s, NULL, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_store_port(NULL), 0);
  cddp_store_destroy(NULL);
  CHECK_OK(cddp_store_set(s, "text", "no number", 9));
  CHECK_IS(cddp_store_add(s, "text", 1, &n), CDDP_NETWORK); /* as c10d: the server hangs up */
  CHECK(error_says("decimal"));
  CHECK_OK(cddp_store_add(s, "number", 1, &n)); /* and the next operation connects anew */
  CHECK_EQ(n, 1);
  CHECK_IS(cddp_store_get(s, "text", value, 1, &size), CDDP_INVALID_ARGUMENT);
  CHECK(error_says("cddp_store_get: ") && error_says("'text'") && size == 9);
  snprintf(where, sizeof where, "store at 127.0.0.1:%d: ", cddp_store_port(s));
  CHECK_IS(cddp_store_wait(s, keys, 1, 0.01), CDDP_TIMEOUT); /* it names the port that it got */
  CHECK(error_says("cddp_store_wait: ") && error_says(where));
  cddp_store_destroy(s);
}

/* --- waiting -------------------------------------------------------------------------------- */

typedef struct job {
  cddp_store *store;
  const char *url;
  int rank, ranks;
  double delay;
  int64_t total;
} job;

static void *set_later(void *arg) {
  job *j = (job *)arg;
  cddp__sleep(j->delay);
  CHECK_OK(cddp_store_set(j->store, "late", "now", 3));
  return NULL;
}

static void wait_on(cddp_store *waiter, cddp_store *setter) {
  job j;
  pthread_t t;
  char value[8];
  size_t size = 0;
  const char *keys[2] = {"never", "late"};
  double start = test_now();
  CHECK_IS(cddp_store_wait(waiter, keys, 2, 0.1), CDDP_TIMEOUT);
  CHECK(error_says("never") && test_now() - start >= 0.1 && test_now() - start < 5);
  memset(&j, 0, sizeof j);
  j.store = setter;
  j.delay = 0.05;
  CHECK_EQ(pthread_create(&t, NULL, set_later, &j), 0);
  CHECK_OK(cddp_store_get(waiter, "late", value, sizeof value, &size));
  CHECK(size == 3 && memcmp(value, "now", 3) == 0);
  pthread_join(t, NULL);
}

static void test_waiting(void) {
  cddp_store *s = serve(NULL), *c = NULL, *f = NULL, *g = NULL;
  int i;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  wait_on(c, s);
  for (i = 0; i < 200; i++) { /* the key comes around the time that the waiter gives up */
    const char *key = "late";
    cddp_result r;
    job j;
    pthread_t t;
    int64_t n = 0;
    memset(&j, 0, sizeof j);
    j.store = s;
    j.delay = 0.001;
    cddp_store_delete(s, "late", NULL);
    CHECK_EQ(pthread_create(&t, NULL, set_later, &j), 0);
    r = cddp_store_wait(c, &key, 1, 0.0008 + 4e-6 * i);
    CHECK(r == CDDP_OK || r == CDDP_TIMEOUT);
    pthread_join(t, NULL);
    CHECK_OK(cddp_store_add(c, "sane", 1, &n));
    CHECK_EQ(n, i + 1);
  }
  cddp_store_destroy(c);
  cddp_store_destroy(s);
  new_file_path();
  CHECK_OK(open_file(&f, 5));
  CHECK_OK(open_file(&g, 5));
  wait_on(f, g);
  cddp_store_destroy(f);
  cddp_store_destroy(g);
}

static void *wait_for_long(void *arg) {
  const char *key = "late";
  CHECK_OK(cddp_store_wait((cddp_store *)arg, &key, 1, 20));
  return NULL;
}

/* Another thread waits in the same store for longer than this thread may. */
static void test_waiting_for_a_thread(void) {
  cddp_store *s = serve(NULL), *c = NULL;
  const char *key = "k";
  double start;
  char value[4];
  size_t size;
  pthread_t t;
  int i;
  CHECK_OK(cddp_store_set(s, "k", "v", 1));
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  if (c == NULL) return;
  c->timeout_s = 0.2;
  CHECK_EQ(pthread_create(&t, NULL, wait_for_long, c), 0);
  while (pthread_mutex_trylock(&c->lock) == 0) {
    pthread_mutex_unlock(&c->lock);
    cddp__sleep(0.001);
  }
  for (i = 0; i < 3; i++) {
    start = test_now();
    CHECK_IS(i == 0   ? cddp_store_set(c, "k", "w", 1)
             : i == 1 ? cddp_store_get(c, "k", value, sizeof value, &size)
                      : cddp_store_wait(c, &key, 1, 0.1),
             CDDP_TIMEOUT);
    CHECK(error_says("another thread") && test_now() - start < 2);
  }
  CHECK_OK(cddp_store_set(s, "late", "", 0));
  pthread_join(t, NULL);
  CHECK_OK(cddp_store_wait(c, &key, 1, 5));
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

/* Opens a store of its own, counts, meets the others, checks the sum. */
static void *meet(void *arg) {
  job *j = (job *)arg;
  cddp_store_desc d;
  cddp_store *s = NULL;
  int i, round;
  memset(&d, 0, sizeof d);
  d.init_method = j->url;
  d.timeout_s = 60;
  CHECK_OK(cddp_store_create(&s, &d));
  for (round = 0; round < 3 && s != NULL; round++) {
    char name[32], go[32], value[8];
    size_t size = 0;
    int64_t n = 0;
    snprintf(name, sizeof name, "sum%d", round);
    snprintf(go, sizeof go, "go%d", round);
    for (i = 0; i < 20; i++) CHECK_OK(cddp_store_add(s, name, j->rank, NULL));
    CHECK_OK(cddp_store_add(s, "meeting", 1, &n));
    if (n == (round + 1) * j->ranks) CHECK_OK(cddp_store_set(s, go, "go", 2));
    CHECK_OK(cddp_store_get(s, go, value, sizeof value, &size));
    CHECK(size == 2);
    CHECK_OK(cddp_store_add(s, name, 0, &j->total));
    CHECK_EQ(j->total, 20 * j->ranks * (j->ranks - 1) / 2);
  }
  CHECK_OK(cddp_store_add(s, "left", 1, NULL));
  cddp_store_destroy(s);
  return NULL;
}

static void meet_all(const char *url, int ranks) {
  job j[64];
  pthread_t t[64];
  int i;
  for (i = 0; i < ranks; i++) {
    memset(&j[i], 0, sizeof j[i]);
    j[i].url = url;
    j[i].rank = i;
    j[i].ranks = ranks;
    CHECK_EQ(pthread_create(&t[i], NULL, meet, &j[i]), 0);
  }
  for (i = 0; i < ranks; i++) pthread_join(t[i], NULL);
}

static void *share(void *arg) {
  job *j = (job *)arg;
  int i;
  for (i = 0; i < 100; i++) CHECK_OK(cddp_store_add(j->store, "shared", 1, NULL));
  return NULL;
}

static void test_many_clients(void) {
  cddp_store *s = serve(NULL), *f = NULL;
  char url[64];
  pthread_t t[8];
  job j[8];
  int64_t n = 0;
  int i;
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", cddp_store_port(s));
  meet_all(url, 32);
  for (i = 0; i < 8; i++) { /* one store, eight threads */
    memset(&j[i], 0, sizeof j[i]);
    j[i].store = s;
    CHECK_EQ(pthread_create(&t[i], NULL, share, &j[i]), 0);
  }
  for (i = 0; i < 8; i++) pthread_join(t[i], NULL);
  CHECK_OK(cddp_store_add(s, "shared", 0, &n));
  CHECK_EQ(n, 800);
  cddp_store_destroy(s);
  new_file_path();
  CHECK_OK(open_file(&f, 5));
  meet_all(file_url, 12);
  cddp_store_destroy(f);
  CHECK(access(file_path, F_OK) != 0);
}

static void
test_thousands(void) { /* idle clients cost the server a descriptor each, and no thread */
  enum { N = 1500 };
  cddp_store *s = serve(NULL);
  int64_t n = 0;
  int *fds = (int *)malloc(N * sizeof *fds), i, count = N;
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 2 * N + 200) count = (int)limit.rlim_cur / 2 - 100;
  for (i = 0; i < count; i++) {
    fds[i] = raw_connect(cddp_store_port(s));
    talk(fds[i], "00 CE F7 85 3C 06 01.. 02.. 2F 67", "");
  }
  CHECK_OK(cddp_store_set(s, "g", "1", 1)); /* all of them wait for this */
  for (i = 0; i < count; i++) {
    talk(fds[i], "", "00");
    close(fds[i]);
  }
  CHECK_OK(cddp_store_num_keys(s, &n));
  CHECK_EQ(n, 1);
  free(fds);
  cddp_store_destroy(s);
}

/* The server is suspended after it has accepted clients. Their first commands arrive in time, but
   it continues after their deadline: all are served. */
static void test_suspended_server(void) {
  enum { N = 120 }; /* fewer than may be silent */
  int fds[N], ends[2], port = 0, i;
  const char *key = "none";
  cddp_store *s = NULL;
  double start;
  pid_t pid;
  CHECK_EQ(pipe(ends), 0);
  pid = fork();
  if (pid == 0) {
    port = cddp_store_port(serve(NULL));
    (void)!write(ends[1], &port, sizeof port);
    for (;;) pause();
  }
  CHECK_EQ(read(ends[0], &port, sizeof port), sizeof port);
  for (i = 0; i < N; i++) fds[i] = raw_connect(port);
  cddp__sleep(0.05);
  kill(pid, SIGSTOP);
  for (i = 0; i < N; i++) talk(fds[i], "00 CE F7 85 3C 0D 01 02 03 04", "");
  cddp__sleep(CDDP__GREETING_S + 0.06);
  kill(pid, SIGCONT);
  for (i = 0; i < N; i++) {
    talk(fds[i], "", "01 02 03 04");
    close(fds[i]);
  }
  CHECK_OK(join(&s, port, NULL, 0.5));
  CHECK_EQ(kill(pid, SIGSTOP), 0);
  start = cddp__now(); /* a wait takes its own limit, and at most the store's to ask why */
  CHECK_IS(cddp_store_wait(s, &key, 1, 0.1), CDDP_TIMEOUT);
  CHECK(cddp__now() - start < 4);
  CHECK(error_says("the server no longer answers"));
  cddp_store_destroy(s);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  close(ends[0]);
  close(ends[1]);
}

/* --- faults --------------------------------------------------------------------------------- */

static void
test_tiny_io(void) { /* a byte at a time, with EINTR and EAGAIN in between, on both sides */
  cddp_store *s = serve("secret"), *c = NULL, *f = NULL;
  char value[3000], back[3000];
  size_t size = 0;
  int64_t n = 0;
  bool yes = false;
  int i;
  memset(value, 'v', sizeof value);
  new_file_path();
  set_fault(FAULT_TINY, 0, 0);
  CHECK_OK(join(&c, cddp_store_port(s), "secret", 20));
  CHECK_OK(open_file(&f, 20));
  for (i = 0; i < 2; i++) {
    cddp_store *t = i == 0 ? c : f;
    const char *key = "none";
    CHECK_OK(cddp_store_set(t, "k", value, sizeof value));
    CHECK_OK(cddp_store_get(t, "k", back, sizeof back, &size));
    CHECK(size == sizeof value && memcmp(value, back, size) == 0);
    CHECK_OK(cddp_store_add(t, "n", 3, &n));
    CHECK_EQ(n, 3);
    CHECK_OK(cddp_store_compare_set(t, "k", value, sizeof value, "x", 1, back, sizeof back, &size,
                                    &yes));
    CHECK(yes && size == 1);
    CHECK_IS(cddp_store_wait(t, &key, 1, 0.05), CDDP_TIMEOUT);
    CHECK_OK(cddp_store_delete(t, "k", &yes));
    CHECK(yes);
    CHECK_OK(cddp_store_num_keys(t, &n));
    CHECK_EQ(n, 1);
  }
  set_fault(FAULT_NONE, 0, 0);
  cddp_store_destroy(c);
  cddp_store_destroy(f);
  cddp_store_destroy(s);
}

/* Operations of a store whose at-th send or recv fails, on whichever side; then another one. */
static void test_reset(void) {
  uint32_t at;
  for (at = 1; at <= 24; at++) {
    cddp_store *s = serve(NULL), *c = NULL;
    int64_t n = 0;
    cddp_result r;
    set_fault(FAULT_AT, at, ECONNRESET);
    r = join(&c, cddp_store_port(s), NULL, 5);
    if (r == CDDP_OK) r = cddp_store_add(c, "n", 1, &n);
    if (r == CDDP_OK) r = cddp_store_add(c, "n", 1, &n);
    set_fault(FAULT_NONE, 0, 0);
    CHECK(c != NULL); /* connecting tries again */
    CHECK(r == CDDP_OK || (r == CDDP_NETWORK && error_says("127.0.0.1:")));
    r = cddp_store_add(c, "n", 1, &n);
    if (r != CDDP_OK) r = cddp_store_add(c, "n", 1, &n); /* the server may have lost it, too */
    CHECK_OK(r);
    cddp_store_destroy(c);
    cddp_store_destroy(s);
  }
}

static void test_full_disk(void) {
  uint32_t at;
  int refused = 0;
  for (at = 1; at <= 8; at++) {
    cddp_store *f = NULL;
    cddp_result r;
    new_file_path();
    set_fault(FAULT_FILE, at, at % 2 ? ENOSPC : EIO);
    r = open_file(&f, 5);
    set_fault(FAULT_NONE, 0, 0);
    CHECK(r == CDDP_OK || (r == CDDP_IO && error_says(file_path)));
    refused += r == CDDP_IO;
    cddp_store_destroy(f);
    CHECK(access(file_path, F_OK) != 0); /* leaves nothing behind */
  }
  CHECK(refused >= 1);
}

static size_t allocations, failing; /* the failing-th allocation fails; live blocks */
static int live;

static void *failing_alloc(size_t bytes, void *user) {
  void *p = NULL;
  (void)user;
  if (__atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST) != failing) p = malloc(bytes);
  if (p != NULL) __atomic_add_fetch(&live, 1, __ATOMIC_SEQ_CST);
  return p;
}

static void counting_free(void *p, void *user) {
  (void)user;
  __atomic_sub_fetch(&live, 1, __ATOMIC_SEQ_CST);
  free(p);
}

/* Some of everything, with an allocator that fails once. */
static bool allocate(const char *url, bool server) {
  cddp_store_desc d;
  cddp_store *s = NULL;
  char value[600];
  const char *keys[3] = {"a", "b", "absent"};
  size_t size;
  int64_t n;
  bool yes, ok;
  cddp_result r;
  memset(&d, 0, sizeof d);
  memset(value, 'x', sizeof value);
  d.init_method = url;
  d.is_server = server;
  d.timeout_s = 0.3;
  d.secret = "s";
  d.allocator.alloc = failing_alloc;
  d.allocator.free = counting_free;
  r = cddp_store_create(&s, &d);
  ok = r == CDDP_OK;
  CHECK(ok == (s != NULL));
  if (s != NULL) {
    ok = cddp_store_set(s, "a", value, sizeof value) == CDDP_OK && ok;
    ok = cddp_store_set(s, "b", "", 0) == CDDP_OK && ok;
    ok = cddp_store_get(s, "a", value, sizeof value, &size) == CDDP_OK && ok;
    ok = cddp_store_add(s, "n", 1, &n) == CDDP_OK && ok;
    ok = cddp_store_compare_set(s, "b", "", 0, "1", 1, value, sizeof value, &size, &yes) ==
             CDDP_OK &&
         ok;
    ok = cddp_store_check(s, keys, 3, &yes) == CDDP_OK && ok;
    r = cddp_store_wait(s, keys, 3, 0.01);
    CHECK(r != CDDP_OK);
    ok = r == CDDP_TIMEOUT && strstr(cddp_error(), "absent") != NULL && ok;
    ok = cddp_store_delete(s, "a", &yes) == CDDP_OK && ok;
    ok = cddp_store_num_keys(s, &n) == CDDP_OK && n == 2 && ok;
  }
  cddp_store_destroy(s);
  CHECK_EQ(live, 0);
  return ok;
}

static void test_allocation(void) {
  size_t all;
  int kind;
  for (kind = 0; kind < 2; kind++) {
    const char *url = kind == 0 ? "tcp://127.0.0.1:0" : file_url;
    new_file_path();
    failing = allocations = 0;
    CHECK(allocate(url, kind == 0));
    all = allocations;
    CHECK(all > 5);
    for (failing = 1; failing <= all + 2; failing++) {
      allocations = 0;
      if (failing > all + 1)
        CHECK(allocate(url, kind == 0));
      else
        allocate(url, kind == 0);
    }
  }
}

/* --- strangers ------------------------------------------------------------------------------ */

static void check_alive(cddp_store *c) {
  int64_t n = 0;
  double start = test_now();
  CHECK_OK(cddp_store_add(c, "alive", 1, &n));
  CHECK(n > 0 && test_now() - start < 0.5);
}

static void test_strangers(void) {
  static const char *const garbage[] = {
      "47 45 54 20 2F 20 48 54 54 50 2F 31 2E 31 0D 0A 0D 0A", /* GET / HTTP/1.1 */
      "16 03 01 02 00 01 00 01 FC 03 03",                      /* TLS */
      "53 53 48 2D 32 2E 30 0D 0A",
      "FF",
      "13",
      "00 CE F7 85 3C FF",
      "00 CE F7 85 3C 00 00 00 00 00",
      "00 CE F7 85 3C 01 FF FF FF FF FF FF FF FF",
      "00 CE F7 85 3C 01 01.. 61 01 00 80 00 00 00 00 00",
      "00 CE F7 85 3C 06 FF FF FF FF FF FF FF 7F",
      "00 CE F7 85 3C 0A 01 00 02 00 00 00 00 00",
      "00 CE F7 85 3D 01 00 00 00",
      "00 FF FF FF FF FF FF FF FF"};
  static const char *const halves[] = {"",
                                       "00",
                                       "00 CE F7 85",
                                       "43",
                                       "43 44 44 50 61 75 74 68 01 02",
                                       "00 CE F7 85 3C 01 02..",
                                       "00 CE F7 85 3C 0D 01",
                                       "03 05.. 69"};
  cddp_store *s = serve(NULL), *c = NULL;
  int fds[32], n = 0, i, idle;
  double start;
  unsigned seed = 7;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  idle = raw_connect(cddp_store_port(s));
  talk(idle, "00 CE F7 85 3C 0D 01 02 03 04", "01 02 03 04");
  for (i = 0; i < (int)(sizeof garbage / sizeof *garbage); i++) {
    fds[0] = raw_connect(cddp_store_port(s));
    talk(fds[0], garbage[i], "");
    CHECK(hangs_up(fds[0], 0.3)); /* at once, not by a deadline */
    close(fds[0]);
    check_alive(c);
  }
  start = test_now();
  for (i = 0; i < (int)(sizeof halves / sizeof *halves); i++) {
    fds[n] = raw_connect(cddp_store_port(s));
    talk(fds[n++], halves[i], "");
  }
  check_alive(c);
  for (i = 0; i < n; i++) {
    CHECK(hangs_up(fds[i], 2));
    close(fds[i]);
    check_alive(c);
  }
  CHECK(test_now() - start < 10);
  talk(idle, "0D 01 02 03 04", "01 02 03 04"); /* idle is fine */
  for (i = 0; i < 200; i++) {
    unsigned char noise[64];
    size_t k, size = (size_t)rand_r(&seed) % sizeof noise;
    int fd = raw_connect(cddp_store_port(s));
    memcpy(noise, cddp__greeting, 5);
    for (k = i % 2 ? 5 : 0; k < sizeof noise; k++)
      noise[k] = (unsigned char)(rand_r(&seed) % 3 ? 0 : rand_r(&seed) % 20);
    if (send(fd, noise, size, MSG_NOSIGNAL) < 0) CHECK(errno == EPIPE || errno == ECONNRESET);
    close(fd);
  }
  check_alive(c);
  close(idle);
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

static void test_trickle(void) { /* a byte now and then does not keep a command alive for ever */
  cddp_store *s = serve(NULL);
  int fd = raw_connect(cddp_store_port(s)), i;
  double start;
  talk(fd, "00 CE F7 85 3C 07", "00..");
  talk(fd, "01 20 00 00 00 00 00 00 00", "");
  start = test_now();
  for (i = 0; i < 30 && !hangs_up(fd, 0.1); i++) {
    if (send(fd, "x", 1, MSG_NOSIGNAL) < 0) break;
  }
  CHECK(test_now() - start < 8);
  CHECK(test_now() - start > 0.5);
  close(fd);
  cddp_store_destroy(s);
}

static void test_no_reader(void) { /* asks and asks and never reads */
  cddp_store *s = serve(NULL), *c = NULL;
  int fd = raw_connect(cddp_store_port(s)), i, slow;
  char *big = (char *)calloc(1, 4 << 20);
  unsigned char get[512];
  size_t n = from_hex("03 | 04.. 2F 62 69 67", get), got = 0;
  double start = test_now();
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  CHECK_OK(cddp_store_set(s, "big", big, 4 << 20));
  talk(fd, "00 CE F7 85 3C", "");
  for (i = 0; i < 1000 && send(fd, get, n, MSG_NOSIGNAL | MSG_DONTWAIT) > 0; i++) continue;
  check_alive(c);
  slow = raw_connect(cddp_store_port(s));
  talk(slow, "00 CE F7 85 3C", "");
  for (i = 0; i < 8; i++) CHECK_EQ(send(slow, get, n, MSG_NOSIGNAL), n);
  while (got < 8 * (size_t)((4 << 20) + 8)) { /* one who does read gets it all, however slowly */
    ssize_t k = recv(slow, big, 4 << 20, 0);
    CHECK(k > 0);
    if (k <= 0) break;
    got += (size_t)k;
    cddp__sleep(0.002);
  }
  while (test_now() - start < 1.5) check_alive(c);
  for (i = 0; i < 100; i++) { /* what was on its way, then the end */
    ssize_t k = recv(fd, big, 4 << 20, 0);
    if (k <= 0) break;
  }
  CHECK(i < 100);
  close(slow);
  close(fd);
  free(big);
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

static void test_no_descriptors(void) {
  cddp_store *s = serve(NULL), *c = NULL;
  int port = cddp_store_port(s), status = 0, pipes[2], used = open_descriptors();
  struct rlimit old, less;
  struct timespec cpu0, cpu1;
  pid_t pid;
  char byte;
  CHECK_EQ(pipe(pipes), 0);
  pid = fork();
  if (pid == 0) {
    int i, fds[40];
    for (i = 0; i < 40; i++) fds[i] = raw_connect(port);
    if (write(pipes[1], "x", 1) != 1) _exit(1);
    cddp__sleep(0.4);
    for (i = 0; i < 40; i++) close(fds[i]);
    _exit(0);
  }
  getrlimit(RLIMIT_NOFILE, &old);
  less = old;
  less.rlim_cur = (rlim_t)used + 10;
  setrlimit(RLIMIT_NOFILE, &less);
  CHECK_EQ(read(pipes[0], &byte, 1), 1);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu0);
  cddp__sleep(0.3);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu1);
  CHECK((double)(cpu1.tv_sec - cpu0.tv_sec) + 1e-9 * (double)(cpu1.tv_nsec - cpu0.tv_nsec) < 0.1);
  check_alive(s);
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK_EQ(status, 0);
  setrlimit(RLIMIT_NOFILE, &old);
  CHECK_OK(join(&c, port, NULL, 5)); /* accepting goes on when they have left */
  cddp_store_destroy(c);
  close(pipes[0]);
  close(pipes[1]);
  cddp_store_destroy(s);
}

/* --- connections ------------------------------------------------------------------------------ */

/* Two ends of a Unix socket. secrets NULL: nothing to prove. */
static void two_ends(cddp__connection c[2], const char *const *secrets) {
  static const cddp_allocator a;
  int fds[2], i;
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  for (i = 0; i < 2; i++) {
    cddp__connection_begin(&c[i], &a, fds[i], i == 0);
    c[i].local = true;
    if (secrets != NULL) CHECK_OK(cddp__connection_begin_proof(&c[i], secrets[i], "test", NULL, 0));
  }
}

/* Continues both ends until end 1 has a frame of at most `most` bytes, or none can arrive. */
static cddp__message *frame_of(cddp__connection c[2], size_t most) {
  cddp__message *m = NULL;
  int turns;
  for (turns = 0; turns < 20000 && m == NULL; turns++) {
    cddp__add32(&fault_calls, (uint32_t)turns % 3); /* else one end could get all EAGAINs */
    (void)cddp__connection_progress(&c[0]);
    if (cddp__connection_progress(&c[1])) m = cddp__connection_receive(&c[1], most);
  }
  return m;
}

static void close_ends(cddp__connection c[2]) {
  cddp__connection_close(&c[0]);
  cddp__connection_close(&c[1]);
}

static void test_connection(void) {
  static const char *const same[] = {"s", "s"}, *const different[] = {"s", "t"};
  static char body[3000], large[1 << 20];
  cddp__frame_head head = cddp__frame_head_of(CDDP__FRAME_MESSAGE, 0, CDDP_U8, 0, 0);
  unsigned char forged[1 + sizeof head] = {'x'};
  cddp__connection c[2], *list[3] = {&c[0], NULL, &c[1]};
  cddp__message *m;
  int tiny, file;
  memset(body, 'b', sizeof body);
  for (tiny = 0; tiny < 2; tiny++) { /* a frame that is posted first follows the proof */
    two_ends(c, same);
    CHECK_OK(cddp__connection_post(&c[0], 7, body, sizeof body));
    set_fault(tiny ? FAULT_TINY : FAULT_NONE, 0, 0);
    m = frame_of(c, sizeof body);
    set_fault(FAULT_NONE, 0, 0);
    CHECK(m != NULL && m->head.number == 7 && m->head.size == sizeof body);
    if (m != NULL) CHECK(memcmp(m + 1, body, sizeof body) == 0);
    free(m);
    CHECK(cddp__connection_is_idle(&c[0]));
    cddp__connection_say_bye(&c[0], CDDP__BYE_ORDERLY);
    CHECK(frame_of(c, 0) == NULL && c[1].error == CDDP__LEFT);
    close_ends(c);
  }
  two_ends(c, different);
  CHECK(frame_of(c, 0) == NULL);
  CHECK(c[0].challenge.state == CDDP__CHALLENGE_REFUSED && c[0].challenge.why == 'W');
  CHECK(c[0].ended_early && c[1].ended_early && c[1].challenge.state == CDDP__CHALLENGE_WRONG);
  close_ends(c);
  two_ends(c, same); /* descriptors wait for the proof */
  c[0].send_fds[0] = file = open("/dev/null", O_RDONLY);
  CHECK_OK(cddp__connection_post(&c[0], 0, body, 1));
  CHECK(!cddp__connection_progress(&c[0]) && !cddp__connection_progress(&c[1]));
  CHECK(c[1].fds[0] < 0 && c[0].send_fds[0] == file);
  m = frame_of(c, 1);
  CHECK(m != NULL && c[1].fds[0] >= 0);
  free(m);
  close(file);
  close_ends(c);
  two_ends(c, same); /* no frame is read behind bytes that are no proof */
  memcpy(forged + 1, &head, sizeof head);
  CHECK_EQ(send(c[0].fd, forged, sizeof forged, 0), sizeof forged);
  CHECK(cddp__receive_message(&c[1], 100) == NULL && c[1].ended_early);
  CHECK(cddp__receive_message(&c[1], 100) == NULL);
  close_ends(c);
  two_ends(c, NULL); /* unread bytes do not end the deadline of a send */
  CHECK_OK(cddp__connection_post(&c[0], 0, large, sizeof large));
  CHECK_EQ(send(c[1].fd, body, 1, 0), 1);
  CHECK_IS(cddp__connection_exchange(&c[0], 0, cddp__now() + 0.2), CDDP_TIMEOUT);
  close_ends(c);
  two_ends(c, NULL); /* a frame beyond the limit ends the connection before memory is allocated */
  CHECK_OK(cddp__connection_post(&c[0], 0, body, 100));
  CHECK(frame_of(c, 99) == NULL && c[1].error == EPROTO && c[1].message == NULL);
  close_ends(c);
  two_ends(c, NULL); /* descriptors, poll, and a peer that ends in the middle of a frame */
  c[0].send_fds[0] = file = open("/dev/null", O_RDONLY);
  CHECK_OK(cddp__connections_poll(NULL, list, 3, NULL, 0, cddp__now()));
  CHECK(!c[1].ready);
  CHECK_OK(cddp__connection_post(&c[0], 0, body, 1));
  (void)cddp__connection_progress(&c[0]);
  CHECK_OK(cddp__connections_poll(NULL, list, 3, NULL, 0, cddp__now() + 10));
  CHECK(c[1].ready);
  m = frame_of(c, 1);
  CHECK(m != NULL && c[1].fds[0] >= 0 && c[1].fds[0] != file && c[1].fds[1] < 0);
  CHECK(c[0].send_fds[0] < 0 && fcntl(file, F_GETFD) >= 0);
  free(m);
  close(file);
  CHECK_EQ(send(c[0].fd, body, 10, 0), 10);
  shutdown(c[0].fd, SHUT_WR);
  CHECK(frame_of(c, 1) == NULL && c[1].state == CDDP__CONNECTION_ENDED && c[1].error == 0);
  CHECK(cddp__connection_exchange(&c[1], 1, cddp__now() + 1) == CDDP_NETWORK);
  close_ends(c);
}

/* --- secrets -------------------------------------------------------------------------------- */

/* The message with the proof of either end, over the nonces of both. */
static void prove(const char *secret, bool caller, const unsigned char nonces[64],
                  unsigned char message[40]) {
  memcpy(message, CDDP__AUTH_PROOF, 8);
  cddp__mac(secret, caller ? "cddp store caller" : "cddp store called", nonces, 64, message + 8);
}

/* Both ends of a challenge in one process; the bytes go over in pieces of `piece`. */
static void meet_challenge(cddp__challenge *a, cddp__challenge *b, size_t piece) {
  int turns;
  for (turns = 0; turns < 200; turns++) {
    cddp__challenge *from = turns % 2 ? b : a, *to = turns % 2 ? a : b;
    size_t at = 0;
    while (at < from->out_size) {
      size_t n = cddp__min(piece, from->out_size - at);
      size_t fed = cddp__challenge_feed(to, from->out + at, n);
      CHECK(fed == n || to->state != CDDP__CHALLENGE_ON);
      at += n;
    }
    from->out_size = 0;
  }
}

static void test_challenge(void) {
  static const size_t pieces[] = {1, 7, 100};
  unsigned char bytes[41];
  cddp__challenge a, b;
  size_t i;
  for (i = 0; i < 3; i++) {
    CHECK_OK(cddp__challenge_begin(&a, "s", "test", true, "hello", 5));
    CHECK_OK(cddp__challenge_begin(&b, "s", "test", false, "hello", 5));
    meet_challenge(&a, &b, pieces[i]);
    CHECK(a.state == CDDP__CHALLENGE_PROVEN && b.state == CDDP__CHALLENGE_PROVEN);
    CHECK_OK(cddp__challenge_begin(&a, "s", "test", true, NULL, 0));
    CHECK_OK(cddp__challenge_begin(&b, "t", "test", false, NULL, 0)); /* another secret */
    meet_challenge(&a, &b, pieces[i]);
    CHECK(a.state == CDDP__CHALLENGE_REFUSED && a.why == 'W' && b.state == CDDP__CHALLENGE_WRONG);
    CHECK_OK(cddp__challenge_begin(&a, "s", "test", true, NULL, 0));
    CHECK_OK(cddp__challenge_begin(&b, "s", "other", false, NULL, 0)); /* another purpose */
    meet_challenge(&a, &b, pieces[i]);
    CHECK(a.state == CDDP__CHALLENGE_REFUSED && b.state == CDDP__CHALLENGE_WRONG);
    CHECK_OK(cddp__challenge_begin(&a, "s", "test", true, "hello", 5));
    CHECK_OK(cddp__challenge_begin(&b, "s", "test", false, "hallo", 5)); /* another context */
    meet_challenge(&a, &b, pieces[i]);
    CHECK(a.state == CDDP__CHALLENGE_REFUSED && b.state == CDDP__CHALLENGE_WRONG);
  }
  CHECK_OK(cddp__challenge_begin(&a, "s", "test", true, NULL, 0)); /* two callers, two called */
  CHECK_OK(cddp__challenge_begin(&b, "s", "test", true, NULL, 0));
  meet_challenge(&a, &b, 1000);
  CHECK(a.state == CDDP__CHALLENGE_NOT_CDDP && b.state == CDDP__CHALLENGE_NOT_CDDP);
  CHECK_OK(cddp__challenge_begin(&a, "s", "test", false, NULL, 0)); /* its own bytes come back */
  CHECK_OK(cddp__challenge_begin(&b, "s", "test", true, NULL, 0));
  CHECK_EQ(cddp__challenge_feed(&a, b.out, b.out_size), 40);
  memcpy(bytes, CDDP__AUTH_PROOF, 8);
  memcpy(bytes + 8, a.out + 8, 32);
  CHECK_EQ(cddp__challenge_feed(&a, bytes, 40), 40);
  CHECK_EQ(a.state, CDDP__CHALLENGE_WRONG);
  CHECK_OK(cddp__challenge_begin(&b, "s", "test", true, NULL, 0)); /* takes no byte too many */
  memcpy(bytes, CDDP__AUTH_REFUSAL "N...", 12);
  CHECK_EQ(cddp__challenge_feed(&b, bytes, 12), 9);
  CHECK(b.state == CDDP__CHALLENGE_REFUSED && b.why == 'N');
}

static void test_secret(void) {
  cddp_store *s = serve("open sesame"), *c = NULL, *plain = serve("");
  unsigned char hello[40], answer[40], proof[40], nonces[64];
  int fd;
  CHECK_OK(join(&c, cddp_store_port(s), "open sesame", 5));
  exercise(c, "secret");
  cddp_store_destroy(c);
  CHECK_IS(join(&c, cddp_store_port(s), "open sesam", 5), CDDP_UNAUTHORIZED);
  CHECK(c == NULL && error_says("CDDP_SECRET"));
  CHECK_IS(join(&c, cddp_store_port(s), NULL, 5), CDDP_UNAUTHORIZED);
  CHECK(error_says("CDDP_SECRET"));
  CHECK_IS(join(&c, cddp_store_port(plain), "open sesame", 5), CDDP_UNAUTHORIZED);
  CHECK(error_says("the server has none"));
  setenv("CDDP_SECRET", "open sesame", 1);
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  cddp_store_destroy(c);
  CHECK_OK(join(&c, cddp_store_port(plain), "", 5)); /* "" = none, whatever the environment says */
  cddp_store_destroy(c);
  unsetenv("CDDP_SECRET");

  memcpy(hello, CDDP__AUTH_HELLO, 8); /* one good dialogue by hand ... */
  memset(hello + 8, 1, 32);
  fd = raw_connect(cddp_store_port(s));
  CHECK_EQ(send(fd, hello, 40, 0), 40);
  CHECK_EQ(recv(fd, answer, 40, MSG_WAITALL), 40);
  CHECK(memcmp(answer, CDDP__AUTH_CHALLENGE, 8) == 0);
  memcpy(nonces, hello + 8, 32);
  memcpy(nonces + 32, answer + 8, 32);
  prove("open sesame", true, nonces, proof);
  CHECK_EQ(send(fd, proof, 40, 0), 40);
  CHECK_EQ(recv(fd, answer, 40, MSG_WAITALL), 40);
  CHECK(memcmp(answer, CDDP__AUTH_ACCEPT, 8) == 0);
  talk(fd, "00 CE F7 85 3C 07", "00..");
  close(fd);
  fd = raw_connect(cddp_store_port(s)); /* ... is worth nothing when replayed */
  CHECK_EQ(send(fd, hello, 40, 0), 40);
  CHECK_EQ(recv(fd, answer, 40, MSG_WAITALL), 40);
  CHECK(memcmp(answer + 8, nonces + 32, 32) != 0);
  CHECK_EQ(send(fd, proof, 40, 0), 40);
  talk(fd, "", "43 44 44 50 64 65 6E 79 57"); /* CDDPdeny W */
  CHECK(hangs_up(fd, 3));
  close(fd);
  fd = raw_connect(cddp_store_port(s)); /* the server's own proof, reflected, neither */
  CHECK_EQ(send(fd, hello, 40, 0), 40);
  CHECK_EQ(recv(fd, answer, 40, MSG_WAITALL), 40);
  memcpy(nonces + 32, answer + 8, 32);
  prove("open sesame", false, nonces, proof);
  CHECK_EQ(send(fd, proof, 40, 0), 40);
  talk(fd, "", "43 44 44 50 64 65 6E 79 57");
  close(fd);
  fd = raw_connect(cddp_store_port(s)); /* no command without the dialogue */
  talk(fd, "00 CE F7 85 3C 01 | 02.. 2F 6B | 03.. 76 61 6C", "43 44 44 50 64 65 6E 79 53");
  CHECK(hangs_up(fd, 3));
  close(fd);
  fd = raw_connect(cddp_store_port(s)); /* half a dialogue */
  CHECK_EQ(send(fd, hello, 40, 0), 40);
  CHECK_EQ(recv(fd, answer, 40, MSG_WAITALL), 40);
  CHECK(hangs_up(fd, 2));
  close(fd);
  {
    int64_t n = -1;
    CHECK_OK(cddp_store_num_keys(s, &n));
    CHECK_EQ(n, 0);
  }
  cddp_store_destroy(plain);
  cddp_store_destroy(s);
}

/* What serves in the place of a server: answers 8 bytes to whoever comes. */
static void *impostor(void *arg) {
  int listener = *(int *)arg, fd = accept(listener, NULL, NULL);
  char bytes[64];
  if (recv(fd, bytes, sizeof bytes, 0) > 0)
    send(fd, "HTTP/1.1 400 Bad Request and so on and so forth", 47, MSG_NOSIGNAL);
  while (recv(fd, bytes, sizeof bytes, 0) > 0) continue;
  close(fd);
  return NULL;
}

static void test_impostor(void) {
  static const char *const secrets[] = {NULL, "s"};
  int i;
  for (i = 0; i < 2; i++) {
    int fd, port;
    pthread_t t;
    cddp_store *c = NULL;
    CHECK_OK(cddp__listen_loopback(&fd, &port));
    fcntl(fd, F_SETFL, 0);
    CHECK_EQ(pthread_create(&t, NULL, impostor, &fd), 0);
    CHECK_IS(join(&c, port, secrets[i], 5), CDDP_NETWORK);
    CHECK(c == NULL && error_says("another program") && error_says("HTTP/1.1"));
    pthread_join(t, NULL);
    close(fd);
  }
}

/* --- addresses ------------------------------------------------------------------------------ */

static cddp_result open_as(const char *url, bool server, double timeout_s, cddp_store **s) {
  cddp__store_options o;
  memset(&o, 0, sizeof o);
  o.desc.init_method = url;
  o.desc.is_server = server;
  o.deadline = cddp__now() + timeout_s;
  o.desc.timeout_s = timeout_s;
  return cddp__store_open(s, &o);
}

/* The number of an interface is the host's own that wrote the address. */
static void test_scopes(void) {
  cddp__address there, here;
  memset(&there, 0, sizeof there);
  there.v6.sin6_family = AF_INET6;
  there.v6.sin6_scope_id = 7;
  here = there;
  here.v6.sin6_scope_id = 3;
  CHECK_EQ(inet_pton(AF_INET6, "fe80::1", &there.v6.sin6_addr), 1);
  cddp__set_scope(&there.v6, &here);
  CHECK_EQ(there.v6.sin6_scope_id, 3);
  here.storage.ss_family = AF_INET;
  cddp__set_scope(&there.v6, &here);
  CHECK_EQ(there.v6.sin6_scope_id, 0);
  CHECK_EQ(inet_pton(AF_INET6, "fd00::1", &there.v6.sin6_addr), 1);
  there.v6.sin6_scope_id = 7;
  cddp__set_scope(&there.v6, &here);
  CHECK_EQ(there.v6.sin6_scope_id, 7);
}

static void test_addresses(void) {
  cddp_store *s = serve(NULL), *t = NULL, *c = NULL;
  char url[64];
  double start;
  int port = cddp_store_port(s), fd, fd2;
  cddp__address a;
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  CHECK_IS(open_as(url, true, 5, &t), CDDP_NETWORK);
  CHECK(t == NULL && error_says("in use") && error_says(url + 6) && !names_variables());
  snprintf(url, sizeof url, "tcp://localhost:%d", port);
  CHECK_IS(open_as(url, true, 5, &t), CDDP_NETWORK);
  CHECK_IS(open_as("tcp://192.0.2.1:0", true, 5, &t), CDDP_NETWORK); /* a documentation address */
  CHECK(error_says("not an address of this host") && !names_variables());
  CHECK_IS(open_as("tcp://no-such-host.invalid:29500", false, 5, &t), CDDP_NETWORK);
  CHECK(error_says("no-such-host.invalid") && !names_variables());
  CHECK_OK(open_as("tcp://localhost:0", true, 5, &t)); /* all its addresses, one port */
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", cddp_store_port(t));
  CHECK_OK(open_as(url, false, 5, &c));
  cddp_store_destroy(c);
  if (t->server->fd_count > 2) {
    snprintf(url, sizeof url, "tcp://[::1]:%d", cddp_store_port(t));
    CHECK_OK(open_as(url, false, 5, &c));
    cddp_store_destroy(c);
  }
  cddp_store_destroy(t);
  CHECK_OK(
      open_as("tcp://0.0.0.0:0", true, 5, &t)); /* all interfaces, when it is written like that */
  cddp_store_destroy(t);
  cddp_store_destroy(s);
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port); /* nobody there any more */
  start = test_now();
  CHECK_IS(open_as(url, false, 0.3, &t), CDDP_TIMEOUT);
  CHECK(test_now() - start >= 0.3 && test_now() - start < 8);
  CHECK(error_says(url + 6) && error_says("refused") && error_says("rank 0"));
  CHECK_OK(open_as(url, true, 5, &t)); /* a port can be used again at once */
  cddp_store_destroy(t);
  races = 2;
  CHECK_OK(open_as(url, true, 5, &t));
  cddp_store_destroy(t);
  CHECK_OK(cddp__listen_loopback(&fd, &port));
  CHECK(cddp__local_address(fd, &a));
  close(fd);
  fd2 = socket(AF_INET, SOCK_STREAM, 0); /* a socket connected to itself */
  if (bind(fd2, &a.any, a.size) == 0 && connect(fd2, &a.any, a.size) == 0)
    CHECK(cddp__connected_to_itself(fd2));
  close(fd2);
}

/* The host's own name means loopback there, and another address to other hosts. */
static void test_own_name(void) {
  cddp__address a[CDDP__ADDRESSES_MAX];
  cddp_store *s = NULL, *c = NULL;
  int n = cddp__interface_addresses(NULL, a, CDDP__ADDRESSES_MAX), i;
  CHECK_OK(open_as("tcp://own.invalid:0", true, 5, &s));
  for (i = 0; i < n && s != NULL; i++) {
    cddp__address_set_port(&a[i], cddp_store_port(s));
    CHECK_OK(open_as(cddp__textf("tcp://%s", cddp__describe_address(&a[i]).s).s, false, 5, &c));
    cddp_store_destroy(c);
  }
  cddp_store_destroy(s);
  CHECK_OK(open_as("tcp://127.0.1.1:0", true, 5, &s)); /* as it is written */
  CHECK(s != NULL && s->server->fd_count == 1);
  cddp_store_destroy(s);
}

/* Names that differ beyond what a socket's name can hold. */
static void test_long_names(void) {
  static const int lengths[] = {105, 106, 107, 108, 109, 123, 124, 300};
  cddp_store *s[2] = {NULL, NULL}, *c = NULL;
  char url[2][320], value[2];
  size_t i, size;
  int k;
  for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    for (k = 0; k < 2; k++) {
      memset(url[k], 'a', sizeof url[k]);
      url[k][snprintf(url[k], sizeof url[k], "unix://cddp-test-%d-", (int)getpid())] = 'a';
      url[k][7 + lengths[i] - 1] = k ? 'y' : 'x';
      url[k][7 + lengths[i]] = 0;
      CHECK_OK(open_as(url[k], true, 5, &s[k]));
      if (s[k] != NULL) CHECK_OK(cddp_store_set(s[k], "k", k ? "y" : "x", 1));
    }
    CHECK_OK(open_as(url[1], false, 5, &c));
    if (c != NULL) CHECK_OK(cddp_store_get(c, "k", value, 1, &size));
    CHECK(value[0] == 'y');
    cddp_store_destroy(c);
    for (k = 0; k < 2; k++) cddp_store_destroy(s[k]);
  }
}

static void *open_late(void *arg) {
  job *j = (job *)arg;
  CHECK_OK(open_as(j->url, false, 10, &j->store));
  return NULL;
}

static void test_late_server(void) {
  int fd = -1, port, i;
  char url[64];
  job j[3];
  pthread_t t[3];
  cddp_store *s = NULL;
  double start;
  CHECK_OK(cddp__listen_loopback(&fd, &port));
  close(fd);
  snprintf(url, sizeof url, "tcp://localhost:%d", port);
  for (i = 0; i < 3; i++) {
    memset(&j[i], 0, sizeof j[i]);
    j[i].url = url;
    CHECK_EQ(pthread_create(&t[i], NULL, open_late, &j[i]), 0);
  }
  cddp__sleep(0.7);
  CHECK_OK(open_as(url, true, 10, &s));
  start = test_now();
  for (i = 0; i < 3; i++) {
    pthread_join(t[i], NULL);
    cddp_store_destroy(j[i].store);
  }
  CHECK(test_now() - start < 4);
  cddp_store_destroy(s);
}

static void test_server_leaves(void) {
  cddp_store *s = serve(NULL), *c = NULL;
  int64_t n;
  double start = test_now();
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  cddp_store_destroy(s);
  CHECK_IS(cddp_store_add(c, "x", 1, &n), CDDP_NETWORK);
  CHECK_IS(cddp_store_add(c, "x", 1, &n), CDDP_NETWORK); /* refused at once: it was there before */
  CHECK(error_says("refused") && test_now() - start < 2);
  cddp_store_destroy(c);
}

/* --- files ---------------------------------------------------------------------------------- */

/* A process that opens the store, sets `key` and stays until it is killed. */
static pid_t holder(const char *key) {
  int pipes[2];
  char byte = 0;
  pid_t pid;
  CHECK_EQ(pipe(pipes), 0);
  pid = fork();
  if (pid == 0) {
    cddp_store *s = NULL;
    if (open_file(&s, 5) != CDDP_OK || cddp_store_set(s, key, "1", 1) != CDDP_OK) _exit(1);
    if (write(pipes[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  close(pipes[1]);
  CHECK_EQ(read(pipes[0], &byte, 1), 1);
  close(pipes[0]);
  return pid;
}

static void end(pid_t pid) {
  CHECK_EQ(kill(pid, SIGKILL), 0);
  CHECK_EQ(waitpid(pid, NULL, 0), pid);
}

static void test_stale_file(void) {
  cddp_store *s = NULL, *t = NULL;
  const char *first = "first", *second = "second";
  bool yes = false;
  int64_t n = 0;
  struct stat st;
  pid_t a, b;
  new_file_path();
  a = holder(first); /* it serves */
  b = holder(second);
  CHECK(stat(file_path, &st) == 0 && (st.st_mode & 0777) == 0600);
  CHECK_OK(open_file(&s, 5));
  CHECK_OK(cddp_store_check(s, &first, 1, &yes));
  CHECK(yes);
  end(b); /* another one dies: the others go on */
  CHECK_OK(cddp_store_check(s, &second, 1, &yes));
  CHECK(yes);
  CHECK_OK(cddp_store_num_keys(s, &n));
  CHECK_EQ(n, 2);
  end(a); /* the store ends with it; the file stays, and means nothing any more */
  CHECK_IS(cddp_store_num_keys(s, &n), CDDP_NETWORK);
  CHECK(error_says(file_path));
  cddp_store_destroy(s);
  CHECK_EQ(access(file_path, F_OK), 0);
  CHECK_OK(open_file(&s, 5));
  CHECK_OK(cddp_store_num_keys(s, &n));
  CHECK_EQ(n, 0);
  CHECK_OK(cddp_store_set(s, "job", "2", 1));
  CHECK_OK(open_file(&t, 5));
  CHECK_OK(cddp_store_num_keys(t, &n));
  CHECK_EQ(n, 1);
  cddp_store_destroy(s);
  CHECK_IS(cddp_store_num_keys(t, &n), CDDP_NETWORK);
  cddp_store_destroy(t);
  CHECK(access(file_path, F_OK) != 0);
  CHECK_OK(open_file(&s, 5)); /* two jobs in sequence */
  CHECK_OK(cddp_store_num_keys(s, &n));
  CHECK_EQ(n, 0);
  cddp_store_destroy(s);
}

/* A child that the serving process has forked lives on: the file is free all the same. */
static void test_forked_holder(void) {
  cddp_store *s = NULL;
  int64_t n = -1;
  pid_t worker;
  new_file_path();
  CHECK_OK(open_file(&s, 5));
  CHECK_OK(cddp_store_set(s, "k", "v", 1));
  worker = fork();
  if (worker == 0)
    for (;;) pause();
  cddp_store_destroy(s);
  CHECK_OK(open_file(&s, 5));
  CHECK_OK(cddp_store_num_keys(s, &n));
  CHECK_EQ(n, 0);
  cddp_store_destroy(s);
  end(worker);
}

/* Processes killed in the middle of writing, again and again: what is there is always whole. */
static void test_killed_writers(void) {
  cddp_store *s = NULL;
  int round;
  int64_t n = 0;
  new_file_path();
  CHECK_OK(open_file(&s, 5));
  for (round = 0; round < 30; round++) {
    pid_t pid = fork();
    if (pid == 0) {
      cddp_store *c = NULL;
      char value[2000];
      memset(value, 'x', sizeof value);
      if (open_file(&c, 5) != CDDP_OK) _exit(1);
      for (;;) {
        if (cddp_store_add(c, "n", 1, NULL) != CDDP_OK) _exit(1);
        if (cddp_store_set(c, "v", value, sizeof value) != CDDP_OK) _exit(1);
      }
    }
    cddp__sleep(0.003 + 0.0005 * round);
    end(pid);
    CHECK_OK(cddp_store_add(s, "n", 1, &n));
  }
  CHECK(n >= 30);
  cddp_store_destroy(s);
  CHECK(access(file_path, F_OK) != 0);
}

static void write_file(const char *bytes, size_t n) {
  int fd = open(file_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK_EQ(write(fd, bytes, n), n);
  close(fd);
}

static cddp_result open_file_as(cddp_store **s, const char *secret) {
  cddp_store_desc d;
  memset(&d, 0, sizeof d);
  d.init_method = file_url;
  d.timeout_s = 5;
  d.secret = secret;
  return cddp_store_create(s, &d);
}

static void test_file_servers(void) { /* the first who comes serves, whoever says he is to */
  cddp_store *s = NULL, *t = NULL;
  cddp_store_desc d;
  int64_t n = 0;
  new_file_path();
  memset(&d, 0, sizeof d);
  d.init_method = file_url;
  d.timeout_s = 5;
  CHECK_OK(cddp_store_create(&s, &d));
  d.is_server = true;
  CHECK_OK(cddp_store_create(&t, &d));
  CHECK_OK(cddp_store_add(s, "n", 1, &n));
  CHECK_OK(cddp_store_add(t, "n", 1, &n));
  CHECK_EQ(n, 2);
  cddp_store_destroy(t);
  cddp_store_destroy(s);
}

static void test_file_secret(void) {
  cddp_store *s = NULL, *t = NULL;
  int64_t n = 0;
  new_file_path();
  CHECK_OK(open_file_as(&s, "sesame"));
  CHECK_IS(open_file_as(&t, "simsalabim"), CDDP_UNAUTHORIZED);
  CHECK(t == NULL && error_says("CDDP_SECRET"));
  CHECK_IS(open_file_as(&t, ""), CDDP_UNAUTHORIZED);
  CHECK_OK(open_file_as(&t, "sesame"));
  CHECK_OK(cddp_store_add(t, "n", 1, &n));
  CHECK_EQ(n, 1);
  cddp_store_destroy(t);
  cddp_store_destroy(s);
}

static void refuse_file(const char *why) {
  cddp_store *s = NULL;
  CHECK_IS(open_file(&s, 5), CDDP_IO);
  CHECK(s == NULL && error_says(why) && error_says(file_path));
  cddp_store_destroy(s);
}

/* Files that may be another user's, or that another may write: neither followed nor changed. */
static void test_untrusted_file(void) {
  char other[300];
  struct stat st;
  cddp_store *s = NULL;
  new_file_path();
  snprintf(other, sizeof other, "%s-other", file_path);
  CHECK_EQ(symlink(other, file_path), 0);
  refuse_file("symbolic link"); /* dangling: nothing is made where it leads */
  CHECK(access(other, F_OK) != 0);
  close(open(other, O_WRONLY | O_CREAT, 0600));
  refuse_file("symbolic link");
  CHECK(stat(other, &st) == 0 && st.st_size == 0);
  unlink(file_path);
  CHECK_EQ(link(other, file_path), 0);
  refuse_file("hard link");
  CHECK(stat(other, &st) == 0 && st.st_size == 0);
  unlink(other);
  CHECK_EQ(chmod(file_path, 0666), 0);
  refuse_file("written by others");
  CHECK_EQ(chmod(file_path, 0600), 0);
  if (geteuid() == 0) {
    CHECK_EQ(chown(file_path, 1234, 1234), 0);
    refuse_file("another user");
    CHECK(stat(file_path, &st) == 0 && st.st_size == 0);
    CHECK_EQ(chown(file_path, 0, 0), 0);
  }
  CHECK_OK(open_file(&s, 5));
  cddp_store_destroy(s);
  CHECK_EQ(mkfifo(file_path, 0600), 0);
  refuse_file("regular file");
  unlink(file_path);
}

static void test_foreign_file(void) {
  static const char text[] =
      "the only copy of somebody's thesis, much longer than any header of any store would be";
  cddp_store *s = NULL, *t = NULL;
  char back[200];
  int fd, n;
  new_file_path();
  for (n = 1; n <= (int)sizeof text; n += n == 10 ? (int)sizeof text - 10 : 9) {
    write_file(text, (size_t)n);
    CHECK_IS(open_file(&s, 5), CDDP_IO);
    CHECK(s == NULL && error_says("not a store") && error_says(file_path));
    fd = open(file_path, O_RDONLY);
    CHECK_EQ(read(fd, back, sizeof back), n);
    CHECK(memcmp(back, text, (size_t)n) == 0);
    close(fd);
  }
  write_file("", 0); /* an empty file, as mktemp makes it, is welcome */
  CHECK_OK(open_file(&s, 5));
  CHECK_OK(cddp_store_set(s, "k", "v", 1));
  fd = open(file_path, O_RDWR); /* damage: an error, never another store */
  CHECK_EQ(pwrite(fd, "garbage", 7, 0), 7);
  CHECK_IS(open_file(&t, 0.3), CDDP_IO);
  CHECK_EQ(pwrite(fd, CDDP__FILE_MAGIC, 7, 0), 7);
  CHECK_EQ(pwrite(fd, "0123456789abcdef", 16, (off_t)offsetof(cddp__store_file, key)), 16);
  CHECK_IS(open_file(&t, 0.3), CDDP_UNAUTHORIZED);
  CHECK_EQ(ftruncate(fd, 40), 0);
  CHECK_IS(open_file(&t, 0.3), CDDP_TIMEOUT);
  close(fd);
  cddp_store_destroy(s);
  CHECK(access(file_path, F_OK) != 0);
  snprintf(file_url, sizeof file_url, "file:///");
  CHECK_IS(open_file(&s, 5), CDDP_INVALID_ARGUMENT);
  snprintf(file_url, sizeof file_url, "file:///proc");
  CHECK_IS(open_file(&s, 5), CDDP_IO);
  snprintf(file_url, sizeof file_url, "file:///no/such/directory/store");
  CHECK_IS(open_file(&s, 5), CDDP_IO);
  CHECK(error_says("directory"));
  snprintf(file_url, sizeof file_url, "file:///dev/null");
  CHECK_IS(open_file(&s, 5), CDDP_IO);
}

/* The one who serves ends while others come in: each gets a store, which may end under it. */
static void *open_and_close(void *arg) {
  int i;
  (void)arg;
  for (i = 0; i < 60; i++) {
    cddp_store *s = NULL;
    cddp_result r;
    CHECK_OK(open_file(&s, 10));
    r = cddp_store_add(s, "x", 1, NULL);
    CHECK(r == CDDP_OK || r == CDDP_NETWORK);
    cddp_store_destroy(s);
  }
  return NULL;
}

static void test_doors(void) {
  pthread_t t[4];
  int i;
  new_file_path();
  for (i = 0; i < 4; i++) CHECK_EQ(pthread_create(&t[i], NULL, open_and_close, NULL), 0);
  for (i = 0; i < 4; i++) pthread_join(t[i], NULL);
  CHECK(access(file_path, F_OK) != 0);
}

static void test_stopped_holder(void) { /* it serves, and is stopped: a deadline, not a hang */
  cddp_store *s = NULL;
  double start;
  pid_t pid;
  new_file_path();
  pid = holder("k");
  CHECK_EQ(kill(pid, SIGSTOP), 0);
  CHECK_EQ(waitpid(pid, NULL, WUNTRACED), pid);
  start = test_now();
  CHECK_IS(open_file(&s, 0.3), CDDP_TIMEOUT);
  CHECK(error_says(file_path) && error_says("suspended") && test_now() - start < 3);
  CHECK_EQ(kill(pid, SIGCONT), 0);
  CHECK_OK(open_file(&s, 5));
  cddp_store_destroy(s);
  end(pid);
  unlink(file_path);
}

/* --- what an audit found ---------------------------------------------------------------------- */

static double cpu_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs fn in a process of its own; whether all its checks passed. */
static bool in_child(void (*fn)(void)) {
  int status = -1;
  pid_t pid = fork();
  if (pid == 0) {
    __atomic_store_n(&test_failures, 0, __ATOMIC_SEQ_CST);
    fn();
    _exit(__atomic_load_n(&test_failures, __ATOMIC_SEQ_CST) != 0);
  }
  waitpid(pid, &status, 0);
  return status == 0;
}

/* A forked child keeps a copy of a connection that both sides have closed: the server must neither
   hear of that connection again nor spin, and its client must see the end. */
static void test_fork_with_clients(void) {
  cddp_store *s = serve(NULL), *c = NULL;
  int raw = raw_connect(cddp_store_port(s)), i;
  pid_t worker;
  double cpu;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  talk(raw, "00 CE F7 85 3C 07", "00..");
  worker = fork();
  if (worker == 0) {
    close(raw); /* the server's ends stay open here */
    close(c->connection.fd);
    for (;;) pause();
  }
  cddp_store_destroy(c);
  cpu = cpu_seconds();
  for (i = 0; i < 60; i++) { /* events of the closed connection, and others in its place */
    int fd = raw_connect(cddp_store_port(s));
    talk(fd, "00 CE F7 85 3C 07", "00..");
    close(fd);
    cddp__sleep(0.005);
  }
  cpu = cpu_seconds() - cpu;
  CHECK(cpu < 0.25);
  talk(raw, "FF", ""); /* the server ends this one: seen at once, although the worker has a copy */
  CHECK(hangs_up(raw, 2));
  close(raw);
  check_alive(s);
  kill(worker, SIGKILL);
  waitpid(worker, NULL, 0);
  cddp_store_destroy(s);
}

/* A forked child ends its copy of a store: the server, and the file, are the parent's. */
static void test_copy_in_child(void) {
  int i;
  for (i = 0; i < 2; i++) {
    cddp_store *s = NULL;
    pid_t pid;
    int status = -1;
    double start = test_now();
    new_file_path();
    if (i == 0) s = serve(NULL);
    if (i == 1) CHECK_OK(open_file(&s, 5));
    pid = fork();
    if (pid == 0) {
      cddp_store_destroy(s);
      _exit(0);
    }
    while (waitpid(pid, &status, WNOHANG) == 0 && test_now() - start < 5) cddp__sleep(0.01);
    CHECK_EQ(status, 0);
    if (status != 0) end(pid);
    check_alive(s);
    CHECK(i == 0 || access(file_path, F_OK) == 0);
    cddp_store_destroy(s);
  }
}

/* Strangers who connect and say nothing take neither the program's descriptors nor its clients'. */
static void keep_descriptors(void) {
  struct rlimit few;
  cddp_store *s = NULL, *c = NULL;
  int ready[2], i, failed = 0, port;
  pid_t pid;
  char byte;
  double start;
  CHECK_EQ(pipe(ready), 0);
  getrlimit(RLIMIT_NOFILE, &few);
  few.rlim_cur = 256;
  setrlimit(RLIMIT_NOFILE, &few);
  s = serve(NULL);
  port = cddp_store_port(s);
  pid = fork();
  if (pid == 0) { /* and come back when they are dropped */
    int fds[400];
    few.rlim_cur = 600;
    setrlimit(RLIMIT_NOFILE, &few);
    for (i = 0; i < 400; i++) fds[i] = raw_connect(port);
    if (write(ready[1], "x", 1) != 1) _exit(1);
    for (i = 0;; i = (i + 1) % 400) {
      close(fds[i]);
      fds[i] = raw_connect(port);
      if (i % 20 == 0) cddp__sleep(0.001);
    }
  }
  CHECK_EQ(read(ready[0], &byte, 1), 1);
  start = test_now();
  CHECK_OK(join(&c, port, NULL, 10));
  CHECK(test_now() - start < 8);
  for (i = 0; i < 100; i++) {
    int k, fds[16];
    for (k = 0; k < 16; k++) failed += (fds[k] = open("/dev/null", O_RDONLY)) < 0;
    for (k = 0; k < 16; k++) close(fds[k]);
    cddp__sleep(0.002);
  }
  CHECK_EQ(failed, 0);
  check_alive(c);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

static void test_descriptors(void) { CHECK(in_child(keep_descriptors)); }

/* Clients that speak the protocol, as anybody may without a secret, leave some, too. */
static void keep_some_descriptors(void) {
  struct rlimit few;
  cddp_store *s = NULL;
  int ready[2], i, failed = 0, port;
  pid_t pid;
  char byte;
  CHECK_EQ(pipe(ready), 0);
  getrlimit(RLIMIT_NOFILE, &few);
  few.rlim_cur = 128;
  setrlimit(RLIMIT_NOFILE, &few);
  s = serve(NULL);
  port = cddp_store_port(s);
  pid = fork();
  if (pid == 0) {
    few.rlim_cur = 600;
    setrlimit(RLIMIT_NOFILE, &few);
    for (i = 0; i < 200; i++) {
      int fd = raw_connect(port);
      if (fd < 0 || send(fd, cddp__greeting, 5, MSG_NOSIGNAL) < 0) break;
    }
    if (write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  CHECK_EQ(read(ready[0], &byte, 1), 1);
  cddp__sleep(0.1);
  for (i = 0; i < 16; i++) failed += open("/dev/null", O_RDONLY) < 0;
  CHECK_EQ(failed, 0);
  check_alive(s);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  cddp_store_destroy(s);
}

static void test_some_descriptors(void) { CHECK(in_child(keep_some_descriptors)); }

/* What the keys take is limited; a full store still answers, and can be emptied. */
static void test_memory(void) {
  cddp_store *s = serve(NULL), *c = NULL;
  unsigned char *big = (unsigned char *)calloc(1, CDDP__VALUE_MAX);
  char key[32], name[900] = "";
  int i, stored = 0;
  int64_t n = 0;
  bool deleted = false;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  for (i = 0; i < 20; i++) { /* 160 MiB, twice what this file allows */
    cddp_result r;
    snprintf(key, sizeof key, "big%d", i);
    r = cddp_store_set(c, key, big, CDDP__VALUE_MAX);
    CHECK(r == CDDP_OK || r == CDDP_NETWORK);
    stored += r == CDDP_OK;
  }
  CHECK(stored >= 4 && stored <= 8);
  CHECK_OK(cddp_store_num_keys(c, &n));
  CHECK_EQ(n, stored);
  CHECK_OK(cddp_store_delete(c, "big0", &deleted));
  CHECK(deleted);
  CHECK_OK(cddp_store_set(c, "big0", big, CDDP__VALUE_MAX));
  for (i = 0; i < 50; i++) CHECK_OK(cddp_store_set(c, "big0", big, CDDP__VALUE_MAX - (size_t)i));
  for (i = 22; i > 6; i--) { /* nearly full */
    snprintf(key, sizeof key, "half%d", i);
    (void)cddp_store_set(c, key, big, (size_t)1 << i);
  }
  memset(name, 'k', sizeof name - 1);
  for (i = 0; i < 9; i++) { /* keys take memory, too */
    name[0] = (char)('a' + i);
    CHECK_IS(cddp_store_set(c, name, NULL, 0), CDDP_NETWORK);
  }
  CHECK_OK(cddp_store_set(c, "big0", big, CDDP__VALUE_MAX - 60)); /* it shrinks */
  CHECK_OK(cddp_store_set(c, "big0", NULL, 0));
  free(big);
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

static void test_any_key(void) { /* a user's keys are his, whatever they are called */
  static const char *const names[] = {"/meeting", "job/0/meeting", "init/"};
  cddp_store *s = serve(NULL), *c = NULL;
  char value[8];
  size_t size = 0, i;
  CHECK_OK(join(&c, cddp_store_port(s), NULL, 5));
  for (i = 0; i < sizeof names / sizeof *names; i++) {
    CHECK_OK(cddp_store_set(c, names[i], "v", 1));
    CHECK_OK(cddp_store_set(c, names[i], NULL, 0));
    CHECK_OK(cddp_store_set(c, names[i], "w", 1));
    CHECK_OK(cddp_store_get(s, names[i], value, sizeof value, &size));
    CHECK(size == 1 && value[0] == 'w');
  }
  cddp_store_destroy(c);
  cddp_store_destroy(s);
}

/* A program that listens and is no store. */
typedef struct foreign {
  int listener;
  const char *answer; /* to a line; NULL: never says a word */
} foreign;

static void *foreign_main(void *arg) {
  const foreign *f = (const foreign *)arg;
  struct pollfd p[16];
  nfds_t n = 1, i;
  memset(p, 0, sizeof p);
  p[0].fd = f->listener;
  p[0].events = POLLIN;
  while (poll(p, n, 100) >= 0) {
    if (fcntl(f->listener, F_GETFD) < 0) break;
    for (i = 1; i < n; i++) {
      char bytes[512];
      ssize_t got = (p[i].revents & POLLIN) ? recv(p[i].fd, bytes, sizeof bytes, 0) : 0;
      if (got > 0 && f->answer != NULL && memchr(bytes, '\n', (size_t)got) != NULL)
        (void)!send(p[i].fd, f->answer, strlen(f->answer), MSG_NOSIGNAL);
    }
    if ((p[0].revents & POLLIN) && n < 16) {
      p[n].fd = accept(f->listener, NULL, NULL);
      p[n].events = POLLIN;
      if (p[n].fd < 0) break;
      n++;
    }
  }
  for (i = 1; i < n; i++) close(p[i].fd);
  return NULL;
}

static void test_foreign_services(void) {
  static const char *const answers[] = {"HTTP/1.0 400 Bad request syntax\r\n\r\n",
                                        "-ERR unknown command\r\n", NULL};
  static const char *const secrets[] = {NULL, "s"};
  size_t i, k;
  for (i = 0; i < 3; i++) {
    for (k = 0; k < 2; k++) {
      int port;
      char where[32];
      pthread_t t;
      cddp_store *c = NULL;
      double start = test_now();
      foreign f;
      f.answer = answers[i];
      CHECK_OK(cddp__listen_loopback(&f.listener, &port));
      snprintf(where, sizeof where, "127.0.0.1:%d", port);
      CHECK_EQ(pthread_create(&t, NULL, foreign_main, &f), 0);
      CHECK_IS(join(&c, port, secrets[k], answers[i] != NULL ? 60 : 1.5),
               answers[i] != NULL ? CDDP_NETWORK : CDDP_TIMEOUT);
      CHECK(test_now() - start < 10);
      CHECK(error_says(where) && error_says("cddp") && error_says("TCPStore"));
      CHECK(error_says(answers[i] != NULL ? "another program" : "sent nothing"));
      CHECK(strstr(cddp_error(), "no connection") == NULL);
      if (i == 0) CHECK(error_says("HTTP/1.0"));
      close(f.listener);
      pthread_join(t, NULL);
    }
  }
}

/* seccomp: the kernel answers EPERM to one system call. */
static bool forbid(const int *calls, int count) {
  struct sock_filter code[8];
  struct sock_fprog program;
  int n = 0, i;
  struct sock_filter load = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  struct sock_filter no = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
  struct sock_filter yes = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  code[n++] = load;
  for (i = 0; i < count; i++) {
    struct sock_filter is = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i], 0, 1);
    code[n++] = is;
    code[n++] = no;
  }
  code[n++] = yes;
  program.len = (unsigned short)n;
  program.filter = code;
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void without_accept(void) { /* an error when the time is over, without a spinning server */
  const int call = SYS_accept4;
  cddp_store_desc d;
  cddp_store *s = NULL;
  double cpu = cpu_seconds();
  CHECK(forbid(&call, 1));
  memset(&d, 0, sizeof d);
  d.init_method = "tcp://127.0.0.1:0";
  d.is_server = true;
  d.timeout_s = 0.5;
  CHECK_IS(cddp_store_create(&s, &d), CDDP_TIMEOUT);
  CHECK(error_says("sent nothing") && cpu_seconds() - cpu < 0.2);
}

static void without_write(void) { /* a server ends all the same */
  const int call = SYS_write;
  cddp_store_desc d;
  cddp_store *s = NULL;
  memset(&d, 0, sizeof d);
  d.init_method = "tcp://127.0.0.1:0";
  d.is_server = true;
  alarm(20);
  CHECK(forbid(&call, 1));
  CHECK_OK(cddp_store_create(&s, &d));
  cddp_store_destroy(s);
}

static void test_seccomp(void) {
  CHECK(in_child(without_accept));
  CHECK(in_child(without_write));
}

int main(void) {
  int before;
  signal(SIGPIPE, SIG_DFL); /* the store must do without it */
  unsetenv("CDDP_SECRET");
  unsetenv("CDDP_TIMEOUT_S");
  before = open_descriptors();
  RUN(test_hash);
  RUN(test_host_port);
  RUN(test_numbers);
  RUN(test_printable);
  RUN(test_frames);
  RUN(test_golden_bytes);
  RUN(test_operations);
  RUN(test_largest);
  RUN(test_arguments);
  RUN(test_waiting);
  RUN(test_waiting_for_a_thread);
  RUN(test_many_clients);
  RUN(test_thousands);
  RUN(test_suspended_server);
  RUN(test_tiny_io);
  RUN(test_reset);
  RUN(test_full_disk);
  RUN(test_strangers);
  RUN(test_trickle);
  RUN(test_no_reader);
  RUN(test_no_descriptors);
  RUN(test_connection);
  RUN(test_challenge);
  RUN(test_secret);
  RUN(test_impostor);
  RUN(test_scopes);
  RUN(test_addresses);
  RUN(test_own_name);
  RUN(test_long_names);
  RUN(test_late_server);
  RUN(test_server_leaves);
  RUN(test_stale_file);
  RUN(test_killed_writers);
  RUN(test_forked_holder);
  RUN(test_file_servers);
  RUN(test_file_secret);
  RUN(test_untrusted_file);
  RUN(test_foreign_file);
  RUN(test_doors);
  RUN(test_stopped_holder);
  RUN(test_fork_with_clients);
  RUN(test_copy_in_child);
  RUN(test_descriptors);
  RUN(test_some_descriptors);
  RUN(test_memory);
  RUN(test_any_key);
  RUN(test_foreign_services);
  RUN(test_seccomp);
  RUN(test_allocation);
  CHECK_EQ(open_descriptors(), before);
  return TEST_END();
}
