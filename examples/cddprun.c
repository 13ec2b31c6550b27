/* cddprun.c - starts a program once for each rank; on several machines, one cddprun on each.
     cc -O2 examples/cddprun.c -o cddprun -lpthread -lm
     ./cddprun -n 4 ./digits                           4 ranks on this machine
     ./cddprun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr node1 ./digits
   The last one runs on node1, the same with --node-rank 1 on the other machine. Options are named
   like torchrun's; - and _ are the same in them, and --name=value works too. Each line of output
   begins with its rank. Exit code: 0; that of the rank that failed first, or 128 + the signal that
   killed it; 128 + the signal that ended cddprun; 2 for bad options. */
#define CDDP_IMPLEMENTATION /* includes stdio.h, stdlib.h and string.h */
#include "../cddp.h"

static const char usage[] =
    "usage: cddprun [options] program [arguments]\n"
    "  -n, --nproc-per-node N  ranks on this machine (1)\n"
    "  --nnodes N              machines; start cddprun on each (1)\n"
    "  --node-rank N           which of them this is, from 0\n"
    "  --master-addr HOST      the machine whose node rank is 0\n"
    "  --master-port PORT      a free port there (29500; on one machine: any free one)\n"
    "  --standalone            one machine, any free port\n"
    "  --serve-store           serve the ranks' store here: for PyTorch programs\n"
    "  --max-restarts N        restart all ranks when one fails, at most N times (0)\n"
    "  --log-dir DIR           write what rank N prints to DIR/rankN.log too\n"
    "  --no-prefix             print lines without their rank\n"
    "  --color WHEN            auto, always or never color the prefix (auto)\n";

/* Says what is wrong with the command line. */
static int refuse(const char *what, const char *which) {
  fprintf(stderr, "cddprun: %s%s\n%s", what, which, usage);
  return 2;
}

/* Whether an argument, up to its '=' if it has one, is this option; torchrun takes - and _. */
static int is(const char *argument, const char *name) {
  for (; *name; argument++, name++)
    if (*argument != *name && !(*argument == '_' && *name == '-')) return 0;
  return *argument == 0 || *argument == '=';
}

/* A whole number, or -1. */
static int number(const char *text) {
  char *end;
  long n = strtol(text, &end, 10);
  return end != text && *end == 0 && n >= 0 && n <= 1 << 20 ? (int)n : -1;
}

static void print_line(int level, const char *line, void *user_data) {
  (void)level, (void)user_data;
  fprintf(stderr, "cddprun: %s\n", line);
}

/* Reads the options into d, up to the program. Returns 0 or the exit code. */
static int read_options(cddp_launch_desc *d, char **argv) {
  const char *color = "auto";
  struct { const char *name, *other; int *number; const char **text; bool *flag; } options[] = {
      {"--nproc-per-node", "-n", &d->nproc_per_node, NULL, NULL},
      {"--nnodes", "", &d->nnodes, NULL, NULL},
      {"--node-rank", "", &d->node_rank, NULL, NULL},
      {"--master-addr", "", NULL, &d->master_addr, NULL},
      {"--master-port", "", &d->master_port, NULL, NULL},
      {"--standalone", "", NULL, NULL, &d->standalone},
      {"--serve-store", "", NULL, NULL, &d->serve_store},
      {"--max-restarts", "", &d->max_restarts, NULL, NULL},
      {"--log-dir", "", NULL, &d->log_dir, NULL},
      {"--no-prefix", "", NULL, NULL, &d->no_prefix},
      {"--color", "", NULL, &color, NULL}};
  const size_t count = sizeof options / sizeof *options;
  for (; *argv && **argv == '-' && strcmp(*argv, "--"); argv++) {
    const char *name = *argv, *equals = strchr(name, '='), *value = equals ? equals + 1 : argv[1];
    size_t k = 0;
    while (k < count && !is(name, options[k].name) && !is(name, options[k].other)) k++;
    if (k == count) return refuse("no such option: ", name);
    if (options[k].flag && equals) return refuse("takes no value: ", name);
    if (options[k].flag) *options[k].flag = true;
    else if (!value) return refuse("a value is missing after ", name);
    else if (options[k].text) *options[k].text = value;
    else if ((*options[k].number = number(value)) < 0) return refuse("not a whole number: ", value);
    argv += !options[k].flag && !equals;
  }
  if (strcmp(color, "auto") && strcmp(color, "always") && strcmp(color, "never"))
    return refuse("--color is auto, always or never, not ", color);
  d->color = strcmp(color, "always") == 0 ? 1 : strcmp(color, "never") == 0 ? -1 : 0;
  argv += *argv && strcmp(*argv, "--") == 0;
  d->argv = (const char *const *)argv;
  return *argv ? 0 : refuse("no program is named", "");
}

int main(int argc, char **argv) {
  cddp_launch_desc desc = {0};
  cddp_launch_report report;
  int code = argc > 1 && (is(argv[1], "-h") || is(argv[1], "--help"));
  if (code) return puts(usage) < 0;
  if ((code = read_options(&desc, argv + 1))) return code;
  desc.logger.log = print_line; /* restarts */
  cddp_result r = cddp_launch(&desc, &report);
  if (r) print_line(0, cddp_error(), NULL);
  if (r == CDDP_INVALID_ARGUMENT) return 2;
  if (report.signal) return 128 + report.signal;
  return report.rank >= 0 ? report.exit_code : r != CDDP_OK;
}
