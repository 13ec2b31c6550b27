/* cddprun.c - starts a program once per rank. On several hosts, run one cddprun on each.
     cc -O2 examples/cddprun.c -o cddprun -lpthread -lm
     ./cddprun -n 4 ./digits                                4 ranks on this host
     ./cddprun -n 4 --elastic --max-restarts 9 ./elastic    lost ranks are replaced, 9 times
     ./cddprun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr node1 ./digits
   The last command runs on node1; run it with --node-rank 1 on the other host. Options have
   torchrun's names. In them - and _ are equal, and --name=value works too.

   EXIT CODE
     0           success
     code        of the rank that failed first; if a signal killed it, 128 + the signal
     127, 126    the program could not be run
     128 + n     signal n ended cddprun
     2, 1        invalid options; any other failure

   ENVIRONMENT. Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
   GROUP_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; TORCHELASTIC_RESTART_COUNT and _MAX_RESTARTS; and
   OMP_NUM_THREADS=1 if that is unset and this host has several ranks. The first rank keeps stdin,
   unless stdin is a terminal: a background process group that reads a terminal is stopped. All
   other ranks read /dev/null.

   OUTPUT. Ranks write into pipes. cddprun prints each line as a whole, with its rank as a prefix:
   "[3] ". An incomplete line (a prompt) is printed after the rank has written nothing for 50 ms; a
   progress bar is printed at each '\r'. If another rank's line follows, the incomplete line gets a
   line end. With --no-prefix cddprun prints exactly the bytes that it reads.

   ELASTIC JOBS. With --elastic the other ranks continue if a rank fails. The rank is started again
   with CDDP_JOIN=1, which lets it join them; at most --max-restarts times in total. The job fails
   when no restarts remain and fewer than --min-nproc ranks are left, or when no rank that has the
   model is left. When the first rank has exited with 0, the exit code is 0: no rank is started
   again, and the exit codes of the others do not matter.
   A rank can only join ranks that have an elastic model. If one fails earlier, cddprun ends all
   ranks and starts all again, as one restart. A rank's cddp_ddp_create tells cddprun that the model
   exists (CDDP_SUPERVISOR).

   ELASTIC JOBS ON SEVERAL HOSTS. Each cddprun restarts its own ranks and counts its own restarts.
   Before the model exists it restarts all of its ranks; ranks on other hosts that had met them fail
   too, and their cddprun restarts them. TORCHELASTIC_RESTART_COUNT stays 0, because the counts can
   differ. Later the ranks can join as long as a rank lives on the host of --master-addr, even if
   none is left on their own host. If the only rank of a host dies in the last moment of
   cddp_ddp_create, its cddprun cannot know that the model exists: the new rank fails. To replace a
   lost host, run cddprun with CDDP_JOIN=1 and its options: all of its ranks join.

   FAILURES AND SIGNALS. After a failure the other ranks have 1 s to report it themselves. Then they
   get SIGTERM, and 5 s later SIGKILL. A rank and the processes that it starts are one process
   group, which cddprun ends with the rank. Signals to cddprun are forwarded to these groups.
   SIGHUP, SIGINT, SIGQUIT and SIGTERM end the run, with SIGKILL after 30 s or at the second signal.
   If cddprun itself is killed by SIGKILL, the kernel kills its ranks (PR_SET_PDEATHSIG), but not
   the processes that they started.

   PORT AND STORE. On one host cddprun binds the port and passes the socket to rank 0
   (CDDP_LISTEN_FD), so that no other process can bind it. With --serve-store cddprun runs the store
   itself: for PyTorch programs, and for wrappers that close descriptors.

   SECRET. On one host the ranks get a random secret (CDDP_JOB_SECRET), unless CDDP_SECRET is set,
   so that no other user can disturb the rendezvous. With --serve-store, and on several hosts, only
   CDDP_SECRET protects it. PyTorch's programs do not support a secret. */
#define CDDP_IMPLEMENTATION /* for --serve-store */
#include "../cddp.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char usage[] =
    "usage: cddprun [options] program [arguments]\n"
    "  -n, --nproc-per-node N  ranks on this machine (1)\n"
    "  --nnodes N              machines; start cddprun on each (1)\n"
    "  --node-rank N           which of them this is, from 0\n"
    "  --master-addr HOST      the machine with node rank 0\n"
    "  --master-port PORT      a free port there (29500; on one machine: any free one)\n"
    "  --standalone            one machine, any free port\n"
    "  --serve-store           serve the ranks' store here: for PyTorch programs\n"
    "  --max-restarts N        restart all ranks when one fails, at most N times (0)\n"
    "  --elastic               restart a rank that fails alone; it joins the others again\n"
    "  --min-nproc N           with --elastic: the fewest ranks that go on without restarts (1)\n"
    "  --log-dir DIR           write what rank N prints to DIR/rankN.log too\n"
    "  --no-prefix             pass output on byte for byte, without ranks\n"
    "  --color WHEN            auto, always or never color the prefix (auto)\n";

enum { MAX_RANKS = 4096, MAX_NODES = 65536, DEFAULT_PORT = 29500 };
enum {
  LINE_MAX_BYTES = 1 << 20, /* longer lines are printed in parts */
  QUEUE_MAX = 1 << 18,      /* bytes queued for output; above it cddprun stops reading from ranks */
  WRITE_MAX = 4096          /* bytes that a pipe accepts in one write if poll reports it writable */
};
enum { SIGNALS, NOTICES, SINKS, STREAMS = SINKS + 2 }; /* kinds of polled descriptors: job.what */
static const double notice_s = 1, grace_s = 5, interrupt_s = 30, pause_s = 0.05;

typedef struct options {
  char **argv; /* the program and its arguments */
  int nproc_per_node, nnodes, node_rank, master_port, max_restarts, min_nproc;
  const char *master_addr, *log_dir, *color;
  bool standalone, serve_store, no_prefix, elastic;
} options;

typedef struct buffer { /* a queue of bytes */
  char *data;
  size_t start, end, capacity;
} buffer;

typedef struct stream { /* stdout or stderr of one rank */
  int fd;               /* the pipe's end here; -1: ended */
  buffer held;          /* an incomplete line */
  double since;         /* time of its last byte */
} stream;

typedef struct sink { /* cddprun's stdout or stderr */
  int fd;             /* -1: it failed */
  bool color;
  int open; /* the stream with the incomplete line that was printed last; -1: none */
  buffer queue;
} sink;

typedef struct job { /* all ranks, from one start to their end */
  const options *o;
  int attempt, count, first; /* restarts so far; ranks on this host; the lowest of them */
  pid_t pids[MAX_RANKS];     /* 0: not started, or ended */
  bool lost[MAX_RANKS];      /* elastic: must be started again */
  bool done[MAX_RANKS];      /* has exited with 0 */
  bool joins[MAX_RANKS];     /* elastic: was started to join */
  bool has[MAX_RANKS];       /* elastic: has told that its model exists */
  bool has_model;            /* elastic: a rank has told so */
  int rank_restarts[MAX_RANKS]; /* elastic: number of restarts */
  int logs[MAX_RANKS];       /* files of --log-dir; -1: none */
  stream streams[2 * MAX_RANKS]; /* rank i's are 2i (stdout) and 2i + 1 (stderr) */
  struct pollfd fds[STREAMS + 2 * MAX_RANKS];
  int what[STREAMS + 2 * MAX_RANKS], polled; /* kinds of fds; number of fds */
  sink sinks[2];
  int sink_count;            /* 1: stdout and stderr are one file */
  int alive;
  int succeeded, restarts;     /* ranks that have exited with 0; elastic: restarts in total */
  int code;                    /* 0, or the exit code of the first failure */
  char why[512];               /* description of the first failure */
  bool rank_failed, by_signal; /* the first failure is a rank's; a signal killed that rank */
  int interrupted;             /* the signal that ends the run; 0: none */
  int next_signal;             /* sent to the ranks at deadline; 0: nothing has failed */
  double deadline;
  int signals;               /* a signalfd */
  sigset_t old_mask;
  cddp_store *store; /* served by this process; NULL: rank 0 serves it */
  int listener;      /* a socket bound for rank 0; -1: none */
  int port;
  int notices;         /* elastic: the socket of CDDP_SUPERVISOR; -1: none */
  char supervisor[64]; /* CDDP_SUPERVISOR without the rank: "NAME:TOKEN-" */
} job;

static double now(void) { /* seconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
  char line[1024], shown[4 * sizeof line], *to = shown, *c;
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  for (c = line; *c; c++) { /* a CR would hide the text before it */
    if ((unsigned char)*c >= ' ') *to++ = *c;
    else to += sprintf(to, *c == '\r' ? "\\r" : "\\x%02x", (unsigned)*c);
  }
  *to = 0;
  fprintf(stderr, "cddprun: %s\n", shown);
}

/* --- options --- */

/* Prints the error in the command line as the last line. */
static int refuse(const char *what, const char *which) {
  fprintf(stderr, "usage: cddprun [options] program [arguments]; see cddprun --help\n");
  say("%s%s", what, which);
  return 2;
}

/* Whether an argument, up to a '=', is this option. As in torchrun, - and _ are equal. */
static bool is(const char *argument, const char *name) {
  for (; *name; argument++, name++)
    if (*argument != *name && !(*argument == '_' && *name == '-')) return false;
  return *argument == 0 || *argument == '=';
}

/* Reads a whole number of low .. high, in plain digits. Returns 0 or the exit code. */
static int read_number(const char *name, const char *text, int low, int high, int *out) {
  bool counts = !strcmp(text, "auto") || !strcmp(text, "cpu") || !strcmp(text, "gpu");
  size_t digits = strspn(text, "0123456789");
  char what[160];
  long n = strtol(text, NULL, 10);
  *out = (int)n;
  if (digits > 0 && text[digits] == 0 && (*text != '0' || digits == 1) && n >= low && n <= high)
    return 0;
  snprintf(what, sizeof what, "%.40s must be a whole number from %d to %d%s, not ", name, low, high,
           counts ? " (cddprun does not count processors or GPUs as torchrun does)" : "");
  return refuse(what, text);
}

/* Rejects an unknown option. If it is one of torchrun's, names cddprun's equivalent. */
static int refuse_option(const char *name) {
  const char *number = name + 2 + (name[1] == 'n' && name[2] == 'p'); /* of -n4, mpirun's -np 4 */
  static const char *const theirs[][2] = {
      {"--no-python", "is not needed: cddprun starts any program"},
      {"--rdzv-backend", "is torchrun's: say --master-addr and --master-port"},
      {"--rdzv-endpoint", "is torchrun's: say --master-addr and --master-port"},
      {"--rdzv-id", "is torchrun's: say --master-addr and --master-port"},
      {"--rdzv-conf", "is torchrun's: say --master-addr and --master-port"},
      {"-m", "is torchrun's: the program is python3 -m MODULE"},
      {"--module", "is torchrun's: the program is python3 -m MODULE"},
      {"-t", "is torchrun's: say --log-dir"},
      {"--tee", "is torchrun's: say --log-dir"},
      {"-r", "is torchrun's: say --log-dir"},
      {"--redirects", "is torchrun's: say --log-dir"}};
  char what[64];
  size_t k;
  if (name[1] == 'n' && strspn(number, "0123456789") == strlen(number))
    return refuse("ranks are counted by -n N, with a space, not ", name);
  for (k = 0; k < sizeof theirs / sizeof *theirs; k++) {
    snprintf(what, sizeof what, "%s ", theirs[k][0]);
    if (is(name, theirs[k][0])) return refuse(what, theirs[k][1]);
  }
  return refuse("no such option: ", name);
}

/* Rejects options that contradict each other. Returns 0 or the exit code. */
static int check_options(const options *o) {
  if (strcmp(o->color, "auto") && strcmp(o->color, "always") && strcmp(o->color, "never"))
    return refuse("--color is auto, always or never, not ", o->color);
  if (o->node_rank >= o->nnodes) return refuse("--node-rank must be less than --nnodes", "");
  if (o->nnodes > 1 && o->standalone) return refuse("--standalone is for one machine", "");
  if (o->nnodes > 1 && o->serve_store)
    return refuse("--serve-store is for one machine; with several, rank 0 serves", "");
  if (o->nnodes > 1 && o->node_rank < 0)
    return refuse("--node-rank must say which machine this is: 0 on --master-addr's, 1 on the next",
                  "");
  if (o->nnodes > 1 && o->master_addr == NULL)
    return refuse("--master-addr must name the machine with --node-rank 0, as others reach it",
                  "");
  if (o->nnodes > MAX_RANKS / o->nproc_per_node)
    return refuse("--nnodes times --nproc-per-node must be at most 4096, the most ranks of a job",
                  "");
  if (o->min_nproc > 0 && !o->elastic) return refuse("--min-nproc goes with --elastic", "");
  if (o->min_nproc > o->nproc_per_node)
    return refuse("--min-nproc must be at most --nproc-per-node", "");
  return o->argv[0] != NULL && o->argv[0][0] != 0 ? 0 : refuse("no program is named", "");
}

/* Reads the options, up to the program. Returns 0 or the exit code. */
static int read_options(options *o, char **argv) {
  struct {
    const char *name, *other;
    int *number, low, high;
    const char **text;
    bool *flag;
  } all[] = {{"--nproc-per-node", "-n", &o->nproc_per_node, 1, MAX_RANKS, NULL, NULL},
             {"--nnodes", "", &o->nnodes, 1, MAX_NODES, NULL, NULL},
             {"--node-rank", "", &o->node_rank, 0, MAX_NODES, NULL, NULL},
             {"--master-port", "", &o->master_port, 0, 65535, NULL, NULL},
             {"--max-restarts", "", &o->max_restarts, 0, 1 << 20, NULL, NULL},
             {"--min-nproc", "", &o->min_nproc, 1, MAX_RANKS, NULL, NULL},
             {"--elastic", "", NULL, 0, 0, NULL, &o->elastic},
             {"--master-addr", "", NULL, 0, 0, &o->master_addr, NULL},
             {"--log-dir", "", NULL, 0, 0, &o->log_dir, NULL},
             {"--color", "", NULL, 0, 0, &o->color, NULL},
             {"--standalone", "", NULL, 0, 0, NULL, &o->standalone},
             {"--serve-store", "", NULL, 0, 0, NULL, &o->serve_store},
             {"--no-prefix", "", NULL, 0, 0, NULL, &o->no_prefix}};
  const size_t count = sizeof all / sizeof *all;
  int code;
  for (; *argv && **argv == '-' && strcmp(*argv, "--") != 0; argv++) {
    const char *name = *argv, *equals = strchr(name, '='), *value = equals ? equals + 1 : argv[1];
    size_t k = 0;
    while (k < count && !is(name, all[k].name) && !is(name, all[k].other)) k++;
    if (k == count) return refuse_option(name);
    if (all[k].flag && equals) return refuse("takes no value: ", name);
    if (all[k].flag) *all[k].flag = true;
    else if (!value) return refuse("a value is missing after ", all[k].name);
    else if (all[k].text) *all[k].text = value;
    else if ((code = read_number(all[k].name, value, all[k].low, all[k].high, all[k].number)))
      return code;
    argv += !all[k].flag && !equals;
  }
  o->argv = argv + (*argv && strcmp(*argv, "--") == 0);
  code = check_options(o);
  if (o->node_rank < 0) o->node_rank = 0;
  return code;
}

/* --- failures, and ending the ranks --- */

/* Records the first failure. The ranks get the signal after `seconds`. */
__attribute__((format(printf, 5, 6))) static void
fail_job(job *j, int code, int signal_number, double seconds, const char *format, ...) {
  va_list args;
  if (j->code != 0) return;
  va_start(args, format);
  vsnprintf(j->why, sizeof j->why, format, args);
  va_end(args);
  j->code = code;
  j->next_signal = signal_number;
  j->deadline = now() + seconds;
}

static void signal_ranks(const job *j, int number) {
  int i;
  for (i = 0; i < j->count; i++)
    if (j->pids[i] > 0) kill(-j->pids[i], number);
}

/* After a failure: sends the next signal, SIGTERM or SIGKILL, when its deadline has passed. */
static void signal_when_due(job *j) {
  if (j->code == 0 || now() < j->deadline) return;
  signal_ranks(j, j->next_signal);
  j->deadline = now() + (j->next_signal == SIGTERM ? grace_s : 1);
  j->next_signal = SIGKILL;
}

/* Reads which ranks have told that their elastic model exists. The limit is for floods of
   strangers. */
static void read_notices(job *j) {
  const char *token = strchr(j->supervisor, ':');
  char text[64];
  int most = MAX_RANKS, i;
  ssize_t n;
  while (most-- > 0 && (n = recv(j->notices, text, sizeof text - 1, MSG_DONTWAIT)) >= 0) {
    text[n] = 0;
    if (strncmp(text, token + 1, strlen(token + 1)) != 0) continue;
    i = atoi(text + strlen(token + 1)) - j->first;
    if (i >= 0 && i < j->count) j->has[i] = j->has_model = true;
  }
}

/* Whether an elastic job goes on without the ranks that have ended: the model exists, and a rank
   that has it can be alive. A rank that dies at the very end of cddp_ddp_create has told nothing:
   the others have 0.2 s to tell. */
static bool goes_on(job *j) {
  struct pollfd fd = {j->notices, POLLIN, 0};
  int i, members = 0;
  read_notices(j);
  if (!j->has_model && j->alive > 0 && poll(&fd, 1, 200) > 0) read_notices(j);
  for (i = 0; i < j->count; i++) members += j->pids[i] > 0 && (!j->joins[i] || j->has[i]);
  return j->has_model && (members > 0 || j->o->nnodes > 1);
}

/* Handles the failure of a rank of an elastic job. Before the model exists, all ranks end, and main
   starts all again. Later restart_lost starts this one again, after all ranks that have ended were
   reaped. */
static void lose_rank(job *j, int i, int code, bool by_signal, const char *how) {
  int least = j->o->min_nproc > 0 ? j->o->min_nproc : 1, there = j->alive, k;
  bool lives = goes_on(j);
  for (k = 0; k < j->count; k++) there += j->lost[k];
  if (j->succeeded > 0) {
    say("%s; the job has ended well without it", how);
  } else if (!j->has_model) {
    j->code = 0;
    fail_job(j, code, SIGTERM, notice_s, "%s before the ranks had created the elastic model", how);
    j->rank_failed = true;
    j->by_signal = by_signal;
  } else if (!lives) {
    fail_job(j, code, SIGTERM, notice_s, "%s: no rank that has the elastic model is left", how);
  } else if (j->attempt + j->restarts < j->o->max_restarts) {
    j->lost[i] = true;
    j->restarts++;
    say("%s; it joins again: restart %d of %d", how, j->attempt + j->restarts,
        j->o->max_restarts);
  } else if (there < least) {
    fail_job(j, code, SIGTERM, notice_s, "%s; of at least %d ranks (--min-nproc) %d are left", how,
             least, there);
  } else {
    say("%s; %d go on", how, there);
  }
}

/* Lists the ranks that had exited with 0 before another rank failed. If they did not call
   cddp_init, the others waited for them. */
static void list_finished(const job *j, char *text, size_t size) {
  size_t n = 0;
  int i, named = 0, count = 0;
  for (i = 0; i < j->count; i++) count += j->done[i];
  if (count == 0) return;
  n += (size_t)snprintf(text, size, "; before that rank%s", count > 1 ? "s" : "");
  for (i = 0; i < j->count && named < 8; i++)
    if (j->done[i])
      n += (size_t)snprintf(text + n, size - n, "%s %d", named++ ? "," : "", j->first + i);
  snprintf(text + n, size - n,
           "%s had exited with code 0; if %s did not call cddp_init, the others waited in vain",
           count > named ? ", ..." : "", count > 1 ? "they" : "it");
}

/* Whether the program is Python or a Python script. */
static bool is_python(const char *program) {
  const char *slash = strrchr(program, '/'), *name = slash ? slash + 1 : program;
  size_t n = strlen(name);
  return strncmp(name, "python", 6) == 0 || (n > 3 && strcmp(name + n - 3, ".py") == 0);
}

/* Handles the end of a rank. If several ranks have ended, one that was killed by a signal counts as
   the first failure: survivors of a killed rank exit because of it. fresh: nothing had failed
   before these ranks were reaped. */
static void note_end(job *j, int i, pid_t pid, int status, bool fresh) {
  bool by_signal = WIFSIGNALED(status);
  int number = by_signal ? WTERMSIG(status) : 0, code = by_signal ? 128 + number
                                                                  : WEXITSTATUS(status);
  char how[160], done[320] = "";
  j->pids[i] = 0;
  j->alive--;
  j->succeeded += status == 0;
  j->done[i] = status == 0;
  if (status == 0 || !fresh || (j->code != 0 && (!by_signal || j->by_signal))) return;
  if (by_signal)
    snprintf(how, sizeof how, "rank %d (pid %d) was killed by signal %d (%s)%s", j->first + i,
             (int)pid, number, strsignal(number), WCOREDUMP(status) ? ", core dumped" : "");
  else
    snprintf(how, sizeof how, "rank %d (pid %d) exited with code %d", j->first + i, (int)pid, code);
  if (j->o->elastic) {
    lose_rank(j, i, code, by_signal, how);
    return;
  }
  j->code = 0;
  list_finished(j, done, sizeof done);
  fail_job(j, code, SIGTERM, notice_s, "%s%s%s", how, done,
           is_python(j->o->argv[0]) && !j->o->serve_store && j->o->nnodes == 1
               ? ". PyTorch programs need --serve-store"
               : "");
  j->rank_failed = true;
  j->by_signal = by_signal;
}

/* Reaps ended ranks. The rest of a rank's process group is killed before the rank is reaped,
   because until then the system cannot reuse the group's number. */
static void reap_ranks(job *j) {
  bool fresh = j->code == 0;
  siginfo_t info;
  int i, status;
  for (;;) {
    memset(&info, 0, sizeof info);
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    for (i = 0; i < j->count && j->pids[i] != info.si_pid; i++) {}
    if (i < j->count) kill(-info.si_pid, SIGKILL);
    if (waitpid(info.si_pid, &status, 0) == info.si_pid && i < j->count)
      note_end(j, i, info.si_pid, status, fresh);
  }
}

static void take_signal(job *j, int number) {
  bool ends = number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT;
  if (number == SIGCHLD) {
    reap_ranks(j);
    return;
  }
  if (ends && j->interrupted != 0) number = SIGKILL; /* the second signal */
  signal_ranks(j, number);
  if (number == SIGTSTP) kill(getpid(), SIGSTOP); /* the signal's default action */
  if (!ends || j->interrupted != 0) return;
  j->interrupted = number;
  fail_job(j, 128 + number, SIGKILL, interrupt_s, "ended by signal %d (%s)", number,
           strsignal(number));
}

/* Redirects signals to j->signals. Signals that are ignored (nohup, a shell's background job) stay
   ignored, except SIGCHLD: if it is ignored, the kernel discards exit codes. */
static bool open_signals(job *j) {
  static const int passed[] = {SIGHUP,  SIGINT,   SIGQUIT, SIGTERM, SIGUSR1,
                               SIGUSR2, SIGWINCH, SIGTSTP, SIGCONT};
  struct sigaction how;
  sigset_t set;
  size_t i;
  signal(SIGCHLD, SIG_DFL);
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (i = 0; i < sizeof passed / sizeof *passed; i++)
    if (sigaction(passed[i], NULL, &how) == 0 && how.sa_handler != SIG_IGN)
      sigaddset(&set, passed[i]);
  j->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  sigaddset(&set, SIGPIPE); /* write must fail instead, with EPIPE */
  sigprocmask(SIG_BLOCK, &set, &j->old_mask);
  if (j->signals < 0) say("signalfd: %s", strerror(errno));
  return j->signals >= 0;
}

/* --- output --- */

static size_t size_of(const buffer *b) { return b->end - b->start; }

static void add(buffer *b, const void *data, size_t n) {
  size_t size = size_of(b);
  if (n == 0) return;
  if (b->end + n > b->capacity) {
    size_t capacity = size + n <= b->capacity ? b->capacity : 2 * (size + n);
    char *moved = (char *)malloc(capacity);
    if (moved == NULL) {
      say("out of memory for the ranks' output");
      exit(1); /* PR_SET_PDEATHSIG ends the ranks */
    }
    if (size > 0) memcpy(moved, b->data + b->start, size);
    free(b->data);
    b->data = moved;
    b->start = 0;
    b->end = size;
    b->capacity = capacity;
  }
  memcpy(b->data + b->end, data, n);
  b->end += n;
}

static void drop(buffer *b, size_t n) {
  b->start += n;
  if (b->start == b->end) b->start = b->end = 0;
}

static void clear(buffer *b) {
  free(b->data);
  memset(b, 0, sizeof *b);
}

static void begin_line(const job *j, sink *k, int s) {
  int rank = j->first + s / 2;
  char prefix[48];
  if (k->color)
    snprintf(prefix, sizeof prefix, "\033[%dm[%d]\033[0m ", 31 + rank % 6, rank);
  else
    snprintf(prefix, sizeof prefix, "[%d] ", rank);
  add(&k->queue, prefix, strlen(prefix));
}

/* Queues the first n held bytes of stream s, a line or a part of one, for output. */
static void queue_output(job *j, int s, size_t n) {
  sink *k = &j->sinks[j->sink_count == 1 ? 0 : s % 2];
  buffer *held = &j->streams[s].held;
  char last = held->data[held->start + n - 1];
  if (k->fd >= 0) {
    if (!j->o->no_prefix && k->open >= 0 && k->open != s) add(&k->queue, "\n", 1);
    if (!j->o->no_prefix && k->open != s) begin_line(j, k, s);
    add(&k->queue, held->data + held->start, n);
    k->open = last == '\n' || last == '\r' ? -1 : s;
  }
  drop(held, n);
}

/* Handles bytes that a rank wrote: queues all lines up to the last '\n' or '\r', and holds the
   rest. A '\r' at the very end is held too, because a '\n' can follow. */
static void take_output(job *j, int s, const char *data, size_t n) {
  stream *t = &j->streams[s];
  size_t i = size_of(&t->held), size;
  if (i > 0 && t->held.data[t->held.end - 1] == '\r') i--;
  add(&t->held, data, n);
  t->since = now();
  while (i < (size = size_of(&t->held))) {
    const char *at = t->held.data + t->held.start + i++;
    if (*at == '\r' && (i == size || at[1] == '\n')) continue;
    if (*at != '\r' && *at != '\n') continue;
    queue_output(j, s, i);
    i = 0;
  }
  if (size > LINE_MAX_BYTES) queue_output(j, s, size);
}

/* Closes a stream that has ended; queues its incomplete line. */
static void end_stream(job *j, int s) {
  sink *k = &j->sinks[j->sink_count == 1 ? 0 : s % 2];
  if (size_of(&j->streams[s].held) > 0) queue_output(j, s, size_of(&j->streams[s].held));
  if (k->open == s && !j->o->no_prefix && k->fd >= 0) add(&k->queue, "\n", 1);
  if (k->open == s) k->open = -1;
  clear(&j->streams[s].held);
  if (j->streams[s].fd >= 0) close(j->streams[s].fd);
  j->streams[s].fd = -1;
}

/* Writes a rank's bytes unchanged to its log file. */
static void write_log(job *j, int s, const char *data, size_t n) {
  int fd = j->logs[s / 2];
  while (fd >= 0 && n > 0) {
    ssize_t got = write(fd, data, n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail_job(j, 1, SIGTERM, 0, "the log of rank %d in %s cannot be written: %s", j->first + s / 2,
               j->o->log_dir, strerror(errno));
      return;
    }
    data += got;
    n -= (size_t)got;
  }
}

/* Reads once from a rank's pipe without blocking. Returns the number of bytes. */
static size_t read_stream(job *j, int s) {
  char data[16384];
  ssize_t n = read(j->streams[s].fd, data, sizeof data);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n <= 0) {
    end_stream(j, s);
    return 0;
  }
  write_log(j, s, data, (size_t)n);
  take_output(j, s, data, (size_t)n);
  return (size_t)n;
}

/* Writes once. If that fails, the ranks' output would be lost, so the run ends. */
static void write_sink(job *j, sink *k) {
  size_t n = size_of(&k->queue) < WRITE_MAX ? size_of(&k->queue) : WRITE_MAX;
  ssize_t got = write(k->fd, k->queue.data + k->queue.start, n);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < 0) {
    fail_job(j, 1, SIGTERM, 0, "the ranks' output cannot be written to descriptor %d: %s", k->fd,
             strerror(errno));
    k->fd = -1;
    clear(&k->queue);
    return;
  }
  drop(&k->queue, (size_t)got);
}

static void open_sinks(job *j) {
  const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
  bool plain = (no_color != NULL && no_color[0] != 0) || term == NULL || strcmp(term, "dumb") == 0;
  struct stat a, b;
  int i;
  for (i = 0; i < 2; i++) {
    j->sinks[i].fd = 1 + i;
    j->sinks[i].open = -1;
    j->sinks[i].color = strcmp(j->o->color, "always") == 0 ||
                        (strcmp(j->o->color, "auto") == 0 && !plain && isatty(1 + i) == 1 &&
                         cddp_launcher_rank() < 0); /* Open MPI gives its ranks a terminal */
  }
  j->sink_count = 2;
  if (fstat(1, &a) == 0 && fstat(2, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
    j->sink_count = 1; /* 2>&1: one queue keeps lines of both whole */
}

/* --- the loop --- */

static size_t queued(const job *j) {
  return size_of(&j->sinks[0].queue) + size_of(&j->sinks[1].queue);
}

/* Milliseconds until the next deadline; at most `most` (-1: no limit). */
static int wait_ms(const job *j, int most) {
  double next = j->code != 0 ? j->deadline : 1e300, left;
  int s;
  for (s = 0; s < 2 * j->count; s++)
    if (size_of(&j->streams[s].held) > 0 && j->streams[s].since + pause_s < next)
      next = j->streams[s].since + pause_s;
  left = (next - now()) * 1000;
  if (left <= 0) return 0;
  if (most < 0) return left < 60000 ? (int)left + 1 : next < 1e300 ? 60000 : -1;
  return left < most ? (int)left + 1 : most;
}

/* Adds a descriptor to the poll set. Only open ones are added: poll fails with more than ulimit
   -n. */
static void poll_fd(job *j, int fd, short events, int what) {
  j->fds[j->polled].fd = fd;
  j->fds[j->polled].events = events;
  j->fds[j->polled].revents = 0;
  j->what[j->polled++] = what;
}

/* Waits for events and handles them. Returns the number of ready descriptors. */
static int step(job *j, int most_ms) {
  struct signalfd_siginfo info;
  int i, ready;
  j->polled = 0;
  poll_fd(j, j->signals, POLLIN, SIGNALS);
  if (j->notices >= 0) poll_fd(j, j->notices, POLLIN, NOTICES);
  for (i = 0; i < 2; i++)
    if (size_of(&j->sinks[i].queue) > 0) poll_fd(j, j->sinks[i].fd, POLLOUT, SINKS + i);
  for (i = 0; i < 2 * j->count && queued(j) <= QUEUE_MAX; i++)
    if (j->streams[i].fd >= 0) poll_fd(j, j->streams[i].fd, POLLIN, STREAMS + i);
  ready = poll(j->fds, (nfds_t)j->polled, wait_ms(j, most_ms));
  for (i = 0; ready > 0 && i < j->polled; i++) {
    int what = j->what[i];
    if (j->fds[i].revents == 0) continue;
    if (what >= STREAMS) read_stream(j, what - STREAMS);
    else if (what >= SINKS) write_sink(j, &j->sinks[what - SINKS]);
    else if (what == NOTICES) read_notices(j);
    else while (read(j->signals, &info, sizeof info) == (ssize_t)sizeof info)
      take_signal(j, (int)info.ssi_signo);
  }
  for (i = 0; i < 2 * j->count; i++)
    if (size_of(&j->streams[i].held) > 0 && now() >= j->streams[i].since + pause_s)
      queue_output(j, i, size_of(&j->streams[i].held));
  signal_when_due(j);
  return ready;
}

/* Reads the bytes that an ended rank left in its pipe. Does not wait for the end of the pipe: a
   process that left the rank's process group can keep it open. */
static void finish_stream(job *j, int s) {
  int left;
  if (j->streams[s].fd < 0 || ioctl(j->streams[s].fd, FIONREAD, &left) != 0) left = 0;
  while (left > 0 && j->streams[s].fd >= 0) {
    size_t got = read_stream(j, s);
    left = got > 0 ? left - (int)got : 0;
  }
  end_stream(j, s);
}

/* Writes all output after the last rank has ended. After a signal, stops if the reader has accepted
   nothing for 1 s. */
static void finish_output(job *j) {
  int s;
  for (s = 0; s < 2 * j->count; s++) finish_stream(j, s);
  while (queued(j) > 0)
    if (step(j, 1000) == 0 && j->interrupted != 0) break;
}

/* --- start --- */

static bool open_pipe(job *j, int *ends) {
  if (pipe2(ends, O_CLOEXEC) == 0) return true;
  fail_job(j, 1, SIGTERM, 0, "pipe2: %s%s", strerror(errno),
           errno == EMFILE ? "; raise ulimit -n: each rank takes 3 descriptors" : "");
  return false;
}

/* A listening socket on the first of host's addresses that this host has. *port 0: any port. */
static int listen_on(job *j, const char *host, int *port) {
  struct addrinfo want, *all = NULL, *a;
  struct sockaddr_storage bound;
  socklen_t size = sizeof bound;
  char text[16];
  int fd = -1, on = 1, e;
  memset(&want, 0, sizeof want);
  want.ai_socktype = SOCK_STREAM;
  snprintf(text, sizeof text, "%d", *port);
  if ((e = getaddrinfo(host, text, &want, &all)) != 0) {
    fail_job(j, 1, SIGTERM, 0, "--master-addr \"%s\": %s", host, gai_strerror(e));
    return -1;
  }
  for (a = all, e = 0; a != NULL && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) break;
    if (e == 0) e = errno;
    if (fd >= 0) close(fd);
    fd = -1;
  }
  freeaddrinfo(all);
  if (fd >= 0 && getsockname(fd, (struct sockaddr *)&bound, &size) == 0)
    *port = ntohs(bound.ss_family == AF_INET6
                      ? ((struct sockaddr_in6 *)(void *)&bound)->sin6_port
                      : ((struct sockaddr_in *)(void *)&bound)->sin_port);
  else if (fd >= 0)
    fail_job(j, 1, SIGTERM, 0, "getsockname: %s", strerror(errno));
  if (fd < 0) fail_job(j, 1, SIGTERM, 0, "cannot listen on %s:%d: %s", host, *port, strerror(e));
  return fd;
}

/* Creates the secret of the ranks that connect at j->port. */
static void make_secret(job *j) {
  uint64_t secret[2];
  char text[64];
  if (getrandom(secret, sizeof secret, 0) != (ssize_t)sizeof secret) {
    fail_job(j, 1, SIGTERM, 0, "getrandom: %s", strerror(errno));
    return;
  }
  snprintf(text, sizeof text, "%d:%016" PRIx64 "%016" PRIx64, j->port, secret[0], secret[1]);
  setenv("CDDP_JOB_SECRET", text, 1);
}

/* Opens the socket of CDDP_SUPERVISOR: an abstract one with a random name, and a token that only
   the ranks know. */
static void open_notices(job *j) {
  struct sockaddr_un a;
  uint64_t bytes[2];
  int n;
  memset(&a, 0, sizeof a);
  a.sun_family = AF_UNIX;
  if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) bytes[0] = bytes[1] = 0;
  snprintf(j->supervisor, sizeof j->supervisor, "cddp-%016" PRIx64 ":%016" PRIx64 "-", bytes[0],
           bytes[1]);
  n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%.21s", j->supervisor);
  j->notices = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (j->notices < 0 ||
      bind(j->notices, (struct sockaddr *)(void *)&a,
           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) != 0)
    fail_job(j, 1, SIGTERM, 0, "a socket for the ranks' notices: %s", strerror(errno));
}

/* Sets MASTER_ADDR; binds rank 0's port, or starts the store. */
static void open_rendezvous(job *j) {
  const options *o = j->o;
  const char *host = o->master_addr != NULL && !o->standalone ? o->master_addr : "127.0.0.1";
  cddp_store_desc desc;
  char where[320];
  j->port = o->standalone ? 0 : o->master_port;
  setenv("MASTER_ADDR", host, 1);
  if (o->nnodes > 1) {
    if (j->port == 0) j->port = DEFAULT_PORT;
  } else if (!o->serve_store) {
    j->listener = listen_on(j, host, &j->port);
    make_secret(j);
  } else {
    memset(&desc, 0, sizeof desc);
    snprintf(where, sizeof where, strchr(host, ':') ? "tcp://[%s]:%d" : "tcp://%s:%d", host,
             j->port);
    desc.init_method = where;
    desc.is_server = true;
    desc.timeout_s = 10;
    if (cddp_store_create(&j->store, &desc) != CDDP_OK)
      fail_job(j, 1, SIGTERM, 0, "%s", cddp_error());
    j->port = cddp_store_port(j->store);
  }
}

/* Opens a rank's log. So that no other user can redirect the output, the directory must belong to
   this user, and the file must be a regular file of this user without other links. */
static bool open_log(job *j, int i) {
  const char *folder = j->o->log_dir;
  char name[64];
  struct stat s;
  int at, fd = -1, life = j->attempt + j->rank_restarts[i];
  if (folder == NULL) return true;
  if (life == 0) snprintf(name, sizeof name, "rank%d.log", j->first + i);
  else snprintf(name, sizeof name, "rank%d.restart%d.log", j->first + i, life);
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
    fail_job(j, 1, SIGTERM, 0, "cannot make the folder %s for logs: %s", folder, strerror(errno));
    return false;
  }
  at = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (at >= 0 && fstat(at, &s) == 0 && s.st_uid != geteuid()) {
    fail_job(
        j, 1, SIGTERM, 0,
        "the folder %s for logs belongs to user %u and could make them overwrite other files; "
        "name one of your own",
        folder, (unsigned)s.st_uid);
    close(at);
    return false;
  }
  if (at >= 0)
    fd = openat(at, name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
  if (fd >= 0 && (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode) || s.st_nlink != 1 ||
                  s.st_uid != geteuid() || ftruncate(fd, 0) != 0)) {
    close(fd);
    fd = -1;
    errno = EPERM;
  }
  j->logs[i] = fd;
  if (fd < 0)
    fail_job(j, 1, SIGTERM, 0, "cannot write the log %s/%s: %s%s", folder, name, strerror(errno),
             errno == ELOOP || errno == EPERM ? "; it must be a file of yours, not a link to one"
                                              : "");
  if (at >= 0) close(at);
  return fd >= 0;
}

static void set_number(const char *name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

/* Sets the environment that rank i inherits. */
static void set_environment(const job *j, int i) {
  const options *o = j->o;
  char supervisor[80];
  set_number("RANK", j->first + i);
  set_number("WORLD_SIZE", o->nnodes * j->count);
  set_number("LOCAL_RANK", i);
  set_number("LOCAL_WORLD_SIZE", j->count);
  set_number("GROUP_RANK", o->node_rank);
  set_number("GROUP_WORLD_SIZE", o->nnodes);
  set_number("MASTER_PORT", j->port);
  set_number("TORCHELASTIC_RESTART_COUNT", o->elastic && o->nnodes > 1 ? 0 : j->attempt);
  set_number("TORCHELASTIC_MAX_RESTARTS", o->max_restarts);
  unsetenv("TORCHELASTIC_RUN_ID");
  unsetenv("CDDP_LISTEN_FD");
  if (j->listener >= 0 && i == 0) set_number("CDDP_LISTEN_FD", j->listener);
  if (j->joins[i]) setenv("CDDP_JOIN", "1", 1);
  else unsetenv("CDDP_JOIN");
  snprintf(supervisor, sizeof supervisor, "%s%d", j->supervisor, j->first + i);
  if (o->elastic) setenv("CDDP_SUPERVISOR", supervisor, 1);
  else unsetenv("CDDP_SUPERVISOR");
  if (o->serve_store) setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  else unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  if (j->count > 1) setenv("OMP_NUM_THREADS", "1", 0);
}

/* Runs the program in a forked child. If that fails, writes errno to the pipe `failure`. */
static void run_rank(const job *j, int i, const int *outputs, int failure, pid_t parent) {
  int null = -1, e;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1); /* the parent died before the prctl */
  setpgid(0, 0);
  if (i != 0 || isatty(0)) null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) dup2(null, 0);
  dup2(outputs[0], 1);
  dup2(outputs[1], 2);
  if (i == 0 && j->listener >= 0) fcntl(j->listener, F_SETFD, 0);
  sigprocmask(SIG_SETMASK, &j->old_mask, NULL);
  execvp(j->o->argv[0], j->o->argv);
  e = errno;
  if (write(failure, &e, sizeof e) < 0) _exit(126);
  _exit(e == ENOENT ? 127 : 126);
}

/* Reports why the program could not be run. */
static void report_exec_error(job *j, int e) {
  const char *name = j->o->argv[0];
  char line[256] = "", why[512];
  FILE *f = fopen(name, "re");
  bool there = f && fgets(line, sizeof line, f);
  if (f) fclose(f);
  line[strcspn(line, "\n")] = 0;
  if (e == ENOENT && strchr(name, '/') == NULL)
    snprintf(why, sizeof why, ": it is in no folder of PATH (a program here is ./NAME)");
  else if (e == ENOENT && strncmp(line, "#!", 2) == 0)
    snprintf(why, sizeof why, " (its first line names an interpreter that is not there: %s)",
             line + 2);
  else if (e == ENOENT && there)
    snprintf(why, sizeof why, " (its dynamic linker is not there: another system's program?)");
  else if (e == EACCES && there)
    snprintf(why, sizeof why, ": %s; make it executable: chmod +x %s", strerror(e), name);
  else
    snprintf(why, sizeof why, ": %s", strerror(e));
  fail_job(j, e == ENOENT ? 127 : 126, SIGTERM, 0, "cannot run \"%s\"%s", name, why);
}

/* Starts rank i. Returns false on failure. */
static bool start_rank(job *j, int i) {
  int out[2] = {-1, -1}, err[2] = {-1, -1}, failure[2] = {-1, -1}, theirs[2], e = 0;
  pid_t parent = getpid(), pid = -1;
  ssize_t got = 0;
  set_environment(j, i);
  if (open_log(j, i) && open_pipe(j, out) && open_pipe(j, err) && open_pipe(j, failure)) {
    theirs[0] = out[1];
    theirs[1] = err[1];
    if ((pid = fork()) == 0) run_rank(j, i, theirs, failure[1], parent);
    if (pid < 0) fail_job(j, 1, SIGTERM, 0, "fork: %s", strerror(errno));
  }
  if (out[1] >= 0) close(out[1]);
  if (err[1] >= 0) close(err[1]);
  if (failure[1] >= 0) close(failure[1]);
  j->streams[2 * i].fd = out[0];
  j->streams[2 * i + 1].fd = err[0];
  if (pid > 0) {
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    setpgid(pid, pid); /* the child calls it too, because either process can run first */
    j->pids[i] = pid;
    j->alive++;
    do got = read(failure[0], &e, sizeof e);
    while (got < 0 && errno == EINTR);
  }
  if (failure[0] >= 0) close(failure[0]);
  if (got == (ssize_t)sizeof e) report_exec_error(j, e);
  return pid > 0 && got == 0;
}

/* Elastic: starts lost ranks again, if other ranks live that they can join. */
static void restart_lost(job *j) {
  int i;
  for (i = 0; i < j->count; i++) {
    if (!j->lost[i]) continue;
    j->lost[i] = false;
    if (j->code != 0 || (j->alive == 0 && j->o->nnodes == 1) || j->succeeded > 0) continue;
    finish_stream(j, 2 * i);
    finish_stream(j, 2 * i + 1);
    if (j->logs[i] >= 0) close(j->logs[i]);
    j->logs[i] = -1;
    j->rank_restarts[i]++;
    j->joins[i] = true;
    j->has[i] = false;
    (void)start_rank(j, i);
  }
}

/* Starts all ranks and handles events until they have ended. */
static void run_ranks(job *j) {
  int i;
  open_rendezvous(j);
  if (j->o->elastic) open_notices(j);
  for (i = 0; i < j->count && j->code == 0 && start_rank(j, i); i++) step(j, 0);
  if (j->listener >= 0) close(j->listener);
  j->listener = -1; /* rank 0 has it */
  for (restart_lost(j); j->alive > 0; restart_lost(j)) step(j, -1);
  finish_output(j);
  clear(&j->sinks[0].queue);
  clear(&j->sinks[1].queue);
  cddp_store_destroy(j->store);
  if (j->notices >= 0) close(j->notices);
  for (i = 0; i < j->count; i++)
    if (j->logs[i] >= 0) close(j->logs[i]);
}

/* Opens /dev/null for each of the descriptors 0, 1 and 2 that is closed: otherwise the next file
   that is opened would get its number. */
static void open_standard_files(void) {
  int fd;
  do fd = open("/dev/null", O_RDWR);
  while (fd >= 0 && fd < 3);
  if (fd >= 3) close(fd);
}

/* joins: all ranks join a running job. */
static void prepare(job *j, const options *o, int attempt, bool joins) {
  int i, signals = j->signals;
  sigset_t mask = j->old_mask;
  memset(j, 0, sizeof *j);
  j->signals = signals;
  j->old_mask = mask;
  j->o = o;
  j->attempt = attempt;
  j->count = o->nproc_per_node;
  j->first = o->node_rank * j->count;
  j->listener = j->notices = -1;
  j->has_model = joins;
  for (i = 0; i < 2 * j->count; i++) j->streams[i].fd = j->logs[i / 2] = -1;
  for (i = 0; i < j->count; i++) j->joins[i] = joins;
  open_sinks(j);
}

int main(int argc, char **argv) {
  options o = {0};
  static job j;
  const char *join = getenv("CDDP_JOIN");
  int code = argc > 1 && (is(argv[1], "-h") || is(argv[1], "--help")), attempt;
  bool again, joins;
  open_standard_files();
  if (code) return puts(usage) < 0;
  o.nproc_per_node = o.nnodes = 1;
  o.node_rank = -1;
  o.color = "auto";
  if ((code = read_options(&o, argv + 1))) return code;
  if (!open_signals(&j)) return 1;
  joins = o.elastic && o.nnodes > 1 && join != NULL && strcmp(join, "1") == 0;
  for (attempt = 0, again = true; again; attempt++) {
    prepare(&j, &o, attempt, joins);
    run_ranks(&j);
    again = j.rank_failed && j.interrupted == 0 && attempt < o.max_restarts;
    if (again)
      say("%s; %srestart %d of %d", j.why, o.elastic ? "all start again: " : "", attempt + 1,
          o.max_restarts);
    else if (j.code != 0 && attempt > 0)
      say("after %d restart%s, %s", attempt, attempt > 1 ? "s" : "", j.why);
    else if (j.code != 0) say("%s", j.why);
  }
  return j.code;
}
