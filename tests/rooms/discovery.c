/* discovery.c - Discovery: rank, size and addresses from what launchers set, and starts with them.

   A case is a text of variables as torchrun, Open MPI, MPICH, Slurm, Flux and others set them; room
   >>discovery must find the same rank, size, local rank and address, or the error that names the
   variable. Then processes start with such variables: names taken by others, other users, two jobs,
   sockets handed over. This file includes the implementation: it reads what was discovered.

   Build and run: cc -std=c11 -O1 -g tests/rooms/discovery.c -o discovery -lpthread -lm */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

#include <sys/un.h>

enum { NOBODY = 65534 };

extern char **environ;

/* --- the environment of a case ---------------------------------------------------------------- */

static const char *const prefixes[] = {
    "RANK=",   "WORLD_SIZE=", "LOCAL_", "MASTER_", "OMPI_",         "PMIX_",   "PMI_",
    "MPI_LOC", "SLURM",       "CDDP_L", "CDDP_TI", "TORCHELASTIC_", "GROUP_",  "MV2_",
    "FLUX_",   "CDDP_J",      "PALS_",  "JSM_",    "ALPS_",         "MPIRUN_", "LSB_"};

/* Exactly these variables of launchers: "RANK=0 WORLD_SIZE=2". */
static void variables(const char *text) {
  char name[64], copy[2048], *next, *word;
  size_t i, k;
  for (i = 0; environ != NULL && environ[i] != NULL;) {
    bool ours = false;
    for (k = 0; k < sizeof prefixes / sizeof *prefixes; k++)
      ours = ours || strncmp(environ[i], prefixes[k], strlen(prefixes[k])) == 0;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(environ[i], "="), environ[i]);
    if (!ours || unsetenv(name) != 0) i++;
  }
  snprintf(copy, sizeof copy, "%s", text);
  for (word = strtok_r(copy, " ", &next); word != NULL; word = strtok_r(NULL, " ", &next)) {
    char *equals = strchr(word, '=');
    *equals = 0;
    setenv(word, equals + 1, 1);
  }
}

static cddp_result discover(const char *text, cddp__config *at) {
  cddp_group_desc d;
  memset(&d, 0, sizeof d);
  variables(text);
  return cddp__discover(at, &d);
}

#define SAYS(text)                                                                      \
  do {                                                                                  \
    test_count();                                                                       \
    if (strstr(cddp_error(), text) == NULL)                                             \
      test_fail(__FILE__, __LINE__, "the error does not say \"%s\"", text);             \
  } while (0)

/* --- ranks and sizes -------------------------------------------------------------------------- */

#define OMPI(rank, size, local, locals)                                               \
  "OMPI_COMM_WORLD_RANK=" rank " OMPI_COMM_WORLD_SIZE=" size                          \
  " OMPI_COMM_WORLD_LOCAL_RANK=" local " OMPI_COMM_WORLD_LOCAL_SIZE=" locals " "
#define HYDRA(rank, size, local, locals) \
  "PMI_RANK=" rank " PMI_SIZE=" size " MPI_LOCALRANKID=" local " MPI_LOCALNRANKS=" locals " "
#define SLURM(rank, size, local, step) \
  "SLURM_PROCID=" rank " SLURM_STEP_NUM_TASKS=" size " SLURM_LOCALID=" local \
  " SLURM_JOB_ID=77 SLURM_STEP_ID=" step " "
#define MVAPICH(rank, size, local, locals)                                                         \
  "MV2_COMM_WORLD_RANK=" rank " MV2_COMM_WORLD_SIZE=" size " MV2_COMM_WORLD_LOCAL_RANK=" local     \
  " MV2_COMM_WORLD_LOCAL_SIZE=" locals " "
#define FLUX(rank, size, local, nodes)                                                             \
  "FLUX_TASK_RANK=" rank " FLUX_JOB_SIZE=" size " FLUX_TASK_LOCAL_ID=" local                       \
  " FLUX_JOB_NNODES=" nodes " FLUX_JOB_ID=f7 FLUX_URI=local:///run/flux/local "
#define PALS(rank, size, local, locals)                                                            \
  "PALS_RANKID=" rank " PMI_RANK=" rank " PMI_SIZE=" size " PALS_LOCAL_RANKID=" local              \
  " PMI_LOCAL_RANK=" local " PMI_LOCAL_SIZE=" locals " PALS_APID=a-1 PALS_NODEID=0 "
#define JSM(rank, size, local, locals)                                                             \
  "JSM_NAMESPACE_RANK=" rank " JSM_NAMESPACE_SIZE=" size " JSM_NAMESPACE_LOCAL_RANK=" local        \
  " JSM_NAMESPACE_LOCAL_SIZE=" locals " "
#define PRTE "PMIX_NAMESPACE=prterun-n1-7@1 "

static const struct {
  const char *set;
  int rank, size, locals, launched; /* launched: what cddp_launcher_rank gives */
} good[] = {
    {"", 0, 1, -1, -1},
    {"RANK= WORLD_SIZE=", 0, 1, -1, -1},
    {"RANK=2 WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=1", 2, 3, -1, 2},
    {"RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", 2, 3, 2, 2},
    {OMPI("1", "2", "1", "2") "PMIX_NAMESPACE=9", 1, 2, 2, 1},
    {HYDRA("3", "4", "0", "1") "MASTER_ADDR=h MASTER_PORT=1", 3, 4, 1, 3},
    {"PMI_RANK=0 PMI_SIZE=1", 0, 1, -1, 0},
    {SLURM("5", "6", "1", "0") "SLURM_STEP_NODELIST=n[1-3]", 5, 6, -1, 5},
    /* RANK before mpirun before Slurm, each with its own local rank. */
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 " OMPI("1", "4", "1", "4")
         HYDRA("2", "5", "2", "5") SLURM("3", "6", "3", "0"),
     0, 2, -1, 0},
    {OMPI("1", "4", "1", "4") HYDRA("2", "5", "2", "5")
         SLURM("3", "6", "3", "0") "PMIX_NAMESPACE=9",
     1, 4, 4, 1},
    {HYDRA("2", "5", "2", "5") SLURM("3", "6", "3", "0") "PMI_PORT=h:1", 2, 5, 5, 2},
    /* srun --mpi=pmi2 sets PMI_RANK too, and Slurm knows more. */
    {"PMI_RANK=3 PMI_SIZE=6 " SLURM("3", "6", "1", "0") "SLURM_STEP_NUM_NODES=1", 3, 6, -1, 3},
    /* One half of RANK and WORLD_SIZE beside a launcher, if they agree. */
    {"WORLD_SIZE=2 " OMPI("1", "2", "1", "2") "PMIX_NAMESPACE=9", 1, 2, 2, 1},
    /* No step: the batch script (an old and a new number for it), an salloc shell, interactive. */
    {SLURM("0", "6", "0", "4294967291"), 0, 1, -1, -1},
    {SLURM("0", "6", "0", "4294967294"), 0, 1, -1, -1},
    {SLURM("0", "6", "0", "4294967290"), 0, 1, -1, -1},
    {"SLURM_JOB_ID=77 SLURM_NTASKS=4", 0, 1, -1, -1},
    {"SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4", 0, 1, -1, -1},
    /* MVAPICH2, Flux, PALS and JSM tell all. */
    {MVAPICH("1", "2", "1", "2") "MPIRUN_ID=9 PMI_ID=1 PMI_PORT=h:1", 1, 2, 2, 1},
    {FLUX("3", "4", "3", "1"), 3, 4, -1, 3},
    {FLUX("3", "4", "3", "1") "PMI_RANK=3 PMI_SIZE=4 PMI_FD=9", 3, 4, -1, 3},
    {PALS("1", "2", "1", "2"), 1, 2, 2, 1},
    {PALS("5", "6", "1", "2") "PALS_LOCAL_SIZE=3 MASTER_ADDR=h MASTER_PORT=1", 5, 6, 3, 5},
    {JSM("1", "2", "1", "2") "PMIX_NAMESPACE=1 PMIX_RANK=1 LSB_JOBID=7", 1, 2, 2, 1},
    /* One rank of one under a launcher of several: cddprun's or torchrun's rank, or meant so. */
    {"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 " OMPI("1", "2", "1", "2"), 0, 1, -1, 0},
    {"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 " SLURM("1", "3", "0", "0"), 0, 1, 1, 0},
    {"RANK=0 WORLD_SIZE=1 " OMPI("0", "1", "0", "1"), 0, 1, -1, 0},
    {"RANK=0 WORLD_SIZE=1 " SLURM("0", "6", "0", "4294967291"), 0, 1, -1, 0},
    /* These tell the rank alone; the user exports all. */
    {"RANK=2 PMIX_RANK=2 WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=1 " PRTE, 2, 3, -1, 2},
    {"RANK=0 PMIX_RANK=0 WORLD_SIZE=1 " PRTE, 0, 1, -1, 0},
    {"RANK=2 ALPS_APP_PE=2 WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=1", 2, 3, -1, 2},
    /* What srun sets besides is no other launcher's: --mpi=pmix, Cray's plugin. */
    {"PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.77.0 " SLURM("3", "6", "1", "0") "MASTER_ADDR=h", 3, 6,
     -1, 3},
    {"PMIX_RANK=3 " SLURM("3", "6", "1", "0") "MASTER_ADDR=h", 3, 6, -1, 3},
    {PALS("3", "6", "1", "2") SLURM("3", "6", "1", "0") "MASTER_ADDR=h", 3, 6, -1, 3},
    {"ALPS_APP_PE=3 " SLURM("3", "6", "1", "0") "MASTER_ADDR=h", 3, 6, -1, 3},
    {"PMIX_RANK=0 PMIX_NAMESPACE=slurm.pmix.77.0 " SLURM("0", "6", "0", "4294967290"), 0, 1, -1,
     -1},
    /* Slurm's variables are those of the daemon that prterun started by srun. */
    {"RANK=3 PMIX_RANK=3 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1 " PRTE SLURM("1", "2", "0", "0"),
     3, 4, -1, 3},
    /* mpirun in a task of Flux. */
    {HYDRA("2", "3", "2", "3") FLUX("0", "1", "0", "1") "PMI_PORT=h:1", 2, 3, 3, 2}};

static void test_ranks(void) {
  cddp__config at;
  size_t i;
  for (i = 0; i < sizeof good / sizeof *good; i++) {
    test_count();
    if (discover(good[i].set, &at) != CDDP_OK) {
      test_fail(__FILE__, __LINE__, "refused: %s", good[i].set);
    } else if (at.rank != good[i].rank || at.world_size != good[i].size ||
               at.local_world_size != good[i].locals) {
      test_fail(__FILE__, __LINE__, "rank %d of %d, %d here, from: %s", at.rank, at.world_size,
                at.local_world_size, good[i].set);
    }
    test_count();
    if (cddp_launcher_rank() != good[i].launched)
      test_fail(__FILE__, __LINE__, "cddp_launcher_rank() is %d for: %s", cddp_launcher_rank(),
                good[i].set);
  }
}

/* LOCAL_WORLD_SIZE is of a job of WORLD_SIZE ranks: it counts if the caller gives that size. */
static void test_given_size(void) {
  static const char *const sets[] = {
      "LOCAL_WORLD_SIZE=2", "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
      "RANK=0 WORLD_SIZE=8 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
      OMPI("0", "2", "0", "2")};
  cddp_group_desc d;
  cddp__config at;
  int i;
  memset(&d, 0, sizeof d);
  d.rank = 1;
  d.world_size = 8;
  d.init_method = "tcp://10.0.0.1:29500";
  for (i = 0; i < 4; i++) {
    variables(sets[i]);
    CHECK_OK(cddp__discover(&at, &d));
    CHECK_EQ(at.world_size, 8);
    CHECK_EQ(at.local_world_size, i == 2 ? 2 : -1);
  }
}

static const struct {
  const char *set;
  const char *says[3]; /* the variables, and the trouble or the cure */
} bad[] = {
    {"RANK=1", {"RANK is set but WORLD_SIZE is not", "MASTER_PORT", "unset RANK"}},
    {"WORLD_SIZE=1", {"WORLD_SIZE is set but RANK is not", "MASTER_ADDR", "unset WORLD_SIZE"}},
    {"OMPI_COMM_WORLD_RANK=1",
     {"OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not", "Open MPI", "unset it"}},
    {"OMPI_COMM_WORLD_SIZE=1",
     {"OMPI_COMM_WORLD_SIZE is set but OMPI_COMM_WORLD_RANK is not", "Open MPI", "unset it"}},
    {"PMI_RANK=1", {"PMI_RANK is set but PMI_SIZE is not", "Hydra", "unset it"}},
    {"PMI_SIZE=1", {"PMI_SIZE is set but PMI_RANK is not", "Hydra", "unset it"}},
    {"RANK=x WORLD_SIZE=2", {"RANK is \"x\"", "not a whole number", ""}},
    {"RANK=0 WORLD_SIZE=2.5", {"WORLD_SIZE is \"2.5\"", "not a whole number", ""}},
    {"RANK=0 WORLD_SIZE=0", {"WORLD_SIZE is 0", "from 1 to", ""}},
    {"RANK=0 WORLD_SIZE=-1", {"WORLD_SIZE is -1", "from 1 to", ""}},
    {"RANK=-1 WORLD_SIZE=4", {"RANK is -1", "WORLD_SIZE is 4", "from 0 to 3"}},
    {"RANK=-2147483648 WORLD_SIZE=1", {"RANK is -2147483648", "WORLD_SIZE is 1", "from 0 to 0"}},
    {"RANK=-1 WORLD_SIZE=2 CDDP_JOIN=1", {"RANK is -1", "WORLD_SIZE is 2", "from 0 to 1"}},
    {OMPI("-1", "2", "0", "2"), {"OMPI_COMM_WORLD_RANK is -1", "from 0 to 1", ""}},
    /* One rank of one, says the shell's startup file; one of several, says the launcher. */
    {"RANK=0 WORLD_SIZE=1 " OMPI("0", "2", "0", "2"),
     {"WORLD_SIZE is 1", "Open MPI's mpirun started 2", "unset RANK and WORLD_SIZE"}},
    {"RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1 " HYDRA("3", "4", "3", "4"),
     {"WORLD_SIZE is 1", "Hydra's mpirun started 4", "LOCAL_RANK=0"}},
    {"RANK=0 WORLD_SIZE=1 " SLURM("1", "3", "0", "0"),
     {"WORLD_SIZE is 1", "srun started 3", "(SLURM_STEP_NUM_TASKS)"}},
    {"RANK=0 WORLD_SIZE=1 " FLUX("0", "4", "0", "2"), {"flux run started 4", "", ""}},
    {"RANK=0 WORLD_SIZE=1 " PALS("0", "4", "0", "2"), {"PALS's mpiexec started 4", "", ""}},
    {"RANK=0 WORLD_SIZE=1 " JSM("0", "4", "0", "2"), {"JSM's jsrun started 4", "", ""}},
    {"RANK=0 WORLD_SIZE=1 " MVAPICH("0", "4", "0", "2"), {"mpirun_rsh started 4", "", ""}},
    {"RANK=0 WORLD_SIZE=99999999999999999999", {"WORLD_SIZE", "99999999999999999999", ""}},
    /* Numbers are plain: strtol would take these. */
    {"RANK=+1 WORLD_SIZE=2", {"RANK is \"+1\"", "not a whole number", ""}},
    {"RANK=01 WORLD_SIZE=2", {"RANK is \"01\"", "not a whole number", ""}},
    {"RANK=\t1 WORLD_SIZE=2", {"RANK is \"\\t1\"", "not a whole number", ""}},
    {"RANK=-0 WORLD_SIZE=2", {"RANK is \"-0\"", "not a whole number", ""}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=029500",
     {"MASTER_PORT is \"029500\"", "not a whole number", ""}},
    {OMPI("0", "02", "0", "2"), {"OMPI_COMM_WORLD_SIZE is \"02\"", "not a whole number", ""}},
    {"CDDP_JOIN=+1 RANK=0 WORLD_SIZE=2", {"CDDP_JOIN is \"+1\"", "not a whole number", ""}},
    /* Control characters, as from a file with CR LF, are shown. */
    {"RANK=1\r WORLD_SIZE=2", {"RANK is \"1\\r\"", "not a whole number", ""}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500\r\n",
     {"MASTER_PORT is \"29500\\r\\n\"", "", ""}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=\0331", {"MASTER_PORT is \"\\x1b1\"", "", ""}},
    {"CDDP_TIMEOUT_S=5\r", {"CDDP_TIMEOUT_S is \"5\\r\"", "", ""}},
    /* A rank of several, but how many? Never one rank alone. */
    {"PMIX_RANK=0 " PRTE, {"PMIX_RANK is 0", "Export RANK=$", "unset PMIX_RANK"}},
    {"PMIX_RANK=3 " PRTE SLURM("1", "2", "0", "0"), {"PMIX_RANK is 3", "Export RANK=$", ""}},
    {"ALPS_APP_PE=0", {"ALPS_APP_PE is 0", "Export RANK=$", "WORLD_SIZE"}},
    {"PALS_RANKID=1 PMIX_RANK=1 PALS_LOCAL_SIZE=2",
     {"PALS_RANKID is 1", "Export RANK=$", "unset PALS_RANKID"}},
    {"PMI_ID=0 PMI_PORT=h:1 MPI_LOCALNRANKS=2", {"PMI_ID is 0", "Export RANK=$", "MASTER_ADDR"}},
    {"FLUX_TASK_RANK=0", {"FLUX_TASK_RANK", "FLUX_JOB_SIZE is not", "Flux"}},
    {"JSM_NAMESPACE_RANK=0", {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE is not", "jsrun"}},
    {"MV2_COMM_WORLD_RANK=0", {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE is not", "MVAPICH2"}},
    {"SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0",
     {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS is not", "srun"}},
    {"RANK=0 PMIX_RANK=0 " PRTE, {"RANK is set but WORLD_SIZE is not", "", ""}},
    {"PMIX_RANK=0 WORLD_SIZE=2 " PRTE, {"PMIX_RANK is 0", "Export RANK=$PMIX_RANK", ""}},
    {"PMIX_RANK=1 " PRTE SLURM("1", "2", "0", "0"), {"PMIX_RANK is 1", "Export RANK=$", ""}},
    {FLUX("0", "4", "0", "2"), {"MASTER_ADDR is not set", "Flux", "--env=MASTER_ADDR=HOST"}},
    {PALS("0", "4", "0", "2"), {"MASTER_ADDR is not set", "PALS", "--env MASTER_ADDR=HOST"}},
    {JSM("0", "4", "0", "2"), {"MASTER_ADDR is not set", "jsrun", "-E MASTER_ADDR=HOST"}},
    {MVAPICH("0", "4", "0", "2"), {"MASTER_ADDR is not set", "mpirun_rsh", "MASTER_ADDR=HOST"}},
    /* A port in MASTER_ADDR, and what is no address. */
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1:29500 MASTER_PORT=29500",
     {"'127.0.0.1:29500' does not resolve", "address without a port", "port in MASTER_PORT"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=[::1]:29500 MASTER_PORT=1",
     {"'[::1]:29500' does not resolve", "address without a port", "port in MASTER_PORT"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=tcp://h MASTER_PORT=1", {"'tcp://h'", "without a port", ""}},
    {"CDDP_JOIN=1",
     {"CDDP_JOIN is 1, but RANK and WORLD_SIZE are not set", "MASTER_ADDR", "running job"}},
    /* An address, but no rank: not one rank alone. */
    {"MASTER_ADDR=h MASTER_PORT=1", {"RANK and WORLD_SIZE are not set", "unset MASTER_ADDR", ""}},
    {"MASTER_ADDR=h", {"MASTER_ADDR is set", "RANK and WORLD_SIZE are not set", ""}},
    {"MASTER_PORT=29500", {"MASTER_PORT is set", "unset MASTER_PORT", ""}},
    {OMPI("2", "2", "0", "2"),
     {"OMPI_COMM_WORLD_RANK is 2", "OMPI_COMM_WORLD_SIZE is 2", "from 0 to 1"}},
    {OMPI("1x", "2", "0", "2"), {"OMPI_COMM_WORLD_RANK is \"1x\"", "not a whole number", ""}},
    {OMPI("0", "2", "0", "0"), {"OMPI_COMM_WORLD_LOCAL_SIZE is 0", "from 1 to", ""}},
    {HYDRA("4", "3", "0", "3"), {"PMI_RANK is 4", "PMI_SIZE is 3", "from 0 to 2"}},
    {SLURM("0", "none", "0", "0"), {"SLURM_STEP_NUM_TASKS is \"none\"", "whole number", ""}},
    {"RANK=0 " OMPI("1", "2", "1", "2"),
     {"RANK is 0 but OMPI_COMM_WORLD_RANK is 1", "Open MPI", "unset RANK"}},
    {"WORLD_SIZE=3 " HYDRA("1", "2", "1", "2"),
     {"WORLD_SIZE is 3 but PMI_SIZE is 2", "Hydra", "unset WORLD_SIZE"}},
    /* Where to meet. */
    {"RANK=0 WORLD_SIZE=2", {"MASTER_ADDR is not", "rank 0's host", "MASTER_PORT to a free port"}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h", {"MASTER_PORT is not", "a free port", "RANK"}},
    {HYDRA("0", "2", "0", "2"), {"unset PMI_RANK to run without", "", ""}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", {"MASTER_PORT is 70000", "65535", ""}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=http", {"MASTER_PORT is \"http\"", "", ""}},
    {OMPI("0", "4", "0", "2") "PMIX_NAMESPACE=9",
     {"MASTER_ADDR is not set", "Open MPI", "-x MASTER_ADDR=HOST"}},
    {OMPI("0", "4", "0", "2") "MASTER_ADDR=h",
     {"MASTER_PORT is not set", "4 ranks", "-x MASTER_PORT=29500"}},
    {HYDRA("0", "4", "0", "2"), {"MASTER_ADDR is not set", "Hydra", "-genv MASTER_ADDR HOST"}},
    {HYDRA("0", "2", "0", "2"), {"MASTER_ADDR is not set", "Hydra", "-genv MASTER_PORT 29500"}},
    {SLURM("0", "4", "0", "0") "SLURM_STEP_NUM_NODES=2",
     {"MASTER_ADDR is not set", "srun", "--export=ALL,MASTER_ADDR=HOST"}},
    {SLURM("0", "4", "0", "0") "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[",
     {"SLURM_STEP_NODELIST is \"n[\"", "not a node list", "MASTER_ADDR"}},
    {SLURM("0", "4", "0", "0") "SLURM_STEP_NUM_NODES=2 SLURM_JOB_NODELIST=,b",
     {"SLURM_JOB_NODELIST is \",b\"", "not a node list", "rank 0's host"}},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 CDDP_LISTEN_FD=x",
     {"CDDP_LISTEN_FD is \"x\"", "not a whole number", ""}},
    {"CDDP_TIMEOUT_S=soon", {"CDDP_TIMEOUT_S is \"soon\"", "seconds above 0", ""}},
    {"CDDP_TIMEOUT_S=0", {"CDDP_TIMEOUT_S is \"0\"", "seconds above 0", ""}}};

static void test_errors(void) {
  cddp__config at;
  size_t i, k;
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    test_count();
    if (discover(bad[i].set, &at) != CDDP_INVALID_ARGUMENT)
      test_fail(__FILE__, __LINE__, "not refused: %s", bad[i].set);
    for (k = 0; k < 3; k++) SAYS(bad[i].says[k]);
    if (strncmp(bad[i].set, "MASTER_", 7) == 0 ||
        strcmp(bad[i].set, "CDDP_JOIN=1") == 0) /* nobody started it as a rank: it may spawn some */
      CHECK_EQ(cddp_launcher_rank(), -1);
    else if (strncmp(bad[i].set, "CDDP_TIMEOUT_S", 14) != 0)
      CHECK(cddp_launcher_rank() >= 0);
  }
}

/* --- an interactive shell of Slurm ------------------------------------------------------------ */

/* What a process in an srun --pty can be. */
enum { TASK, SCRIPT, COMMAND, NO_TERMINAL, SETSID, SETSID_NO_TERMINAL };

/* In a session of its own with a terminal: what cddp_launcher_rank says to the process. */
static int in_terminal(int what, void *arg) {
  int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), fd, status = 0;
  bool terminal = what != NO_TERMINAL && what != SETSID_NO_TERMINAL;
  char name[64] = "";
  pid_t pid;
  if (setsid() < 0 || master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) return 100;
  snprintf(name, sizeof name, "%s", ptsname(master));
  fd = terminal ? open(name, O_RDWR | O_CLOEXEC) : -1; /* now it controls */
  if (terminal && fd < 0) return 101;
  variables((const char *)arg);
  snprintf(name, sizeof name, "%d", (int)getpid());
  setenv("SLURM_TASK_PID", name, 1);
  if (what != TASK) {
    pid = fork();
    if (pid == 0) {
      if (what == COMMAND) setpgid(0, 0);
      if (what >= SETSID) setsid();
      _exit(cddp_launcher_rank() + 1);
    }
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return 102;
    return WEXITSTATUS(status);
  }
  return cddp_launcher_rank() + 1;
}

static int in_pty(int what, const char *text) { /* the rank */
  char copy[512];
  int status = -1;
  pid_t pid;
  snprintf(copy, sizeof copy, "%s", text);
  fflush(NULL);
  pid = fork();
  if (pid == 0) _exit(in_terminal(what, copy));
  ranks_join(&pid, 1, 10, &status);
  return WIFEXITED(status) ? WEXITSTATUS(status) - 1 : -2;
}

static void test_pty(void) {
  static const char pty[] = SLURM("0", "4", "0", "0") "SLURM_PTY_PORT=4 SLURM_STEP_NUM_NODES=1";
  static const char pmi[] = SLURM("0", "4", "0", "0") "SLURM_PTY_PORT=4 PMI_RANK=0 PMI_SIZE=4";
  static const char torchrun[] = SLURM("0", "4", "0", "0") "SLURM_PTY_PORT=4 RANK=3 WORLD_SIZE=4";
  CHECK_EQ(in_pty(TASK, pty), 0);
  CHECK_EQ(in_pty(SCRIPT, pty), 0);
  CHECK_EQ(in_pty(COMMAND, pty), -1); /* a user's own: time to spawn */
  CHECK_EQ(in_pty(COMMAND, pmi), -1);
  CHECK_EQ(in_pty(COMMAND, torchrun), 3);
  CHECK_EQ(in_pty(NO_TERMINAL, pty), 0); /* a step that was started from such a shell */
  CHECK_EQ(in_pty(COMMAND, SLURM("2", "4", "0", "0")), 2);
  CHECK_EQ(in_pty(SETSID, pty), -1); /* setsid ./program, typed into the shell */
  CHECK_EQ(in_pty(SETSID, pmi), -1);
  CHECK_EQ(in_pty(SETSID, torchrun), 3);
  CHECK_EQ(in_pty(SETSID_NO_TERMINAL, pty), 0);           /* another task, which runs a script */
  CHECK_EQ(in_pty(SETSID, SLURM("2", "4", "0", "0")), 2); /* no --pty */
}

/* --- Slurm's short forms ---------------------------------------------------------------------- */

static void test_node_lists(void) {
  static const char *const lists[][2] = {
      {"node[01-03,07],x5", "node01"}, {"a,b", "a"},
      {"n1", "n1"},                    {"node[007]", "node007"},
      {"rack[1-2]n[1-4]", "rack1n1"},  {"r[2,1]-[3-4].x,y", "r2-3.x"},
      {"a-b-[5-6]", "a-b-5"},          {"n[1,3]-ib", "n1-ib"},
      {"[1-2]", "1"},                  {"", NULL},
      {"[", NULL},                     {"n[", NULL},
      {"n[]", NULL},                   {"n[1", NULL},
      {"n]", NULL},                    {"n[[1]]", NULL},
      {"n[-3]", NULL},                 {"n[,3]", NULL},
      {"n[x]", NULL},                  {",a", NULL},
      {"n[1]]", NULL}};
  static char list[4096], host[4096];
  size_t i;
  for (i = 0; i < sizeof lists / sizeof *lists; i++) {
    bool found = cddp__first_host(lists[i][0], host, 64);
    test_count();
    if (found != (lists[i][1] != NULL) || (found && strcmp(host, lists[i][1]) != 0))
      test_fail(__FILE__, __LINE__, "\"%s\" gives %s", lists[i][0], found ? host : "nothing");
  }
  memset(list, 'n', sizeof list - 1); /* a host of 4095 letters */
  CHECK(!cddp__first_host(list, host, 256));
  CHECK(cddp__first_host(list, host, sizeof host) && strcmp(host, list) == 0);
  CHECK(!cddp__first_host(list, host, sizeof host - 1));
  for (i = 4; i < sizeof list - 1; i++) list[i] = "0,"[i % 2]; /* many hosts */
  CHECK(cddp__first_host(list, host, 6) && strcmp(host, "nnnn0") == 0);
  CHECK(!cddp__first_host(list, host, 5));
}

/* --- where to meet ---------------------------------------------------------------------------- */

/* The address that the variables give, in one of two places. */
static const char *meeting(const char *text) {
  static char found[2][1200];
  static int turn;
  cddp__config at;
  turn = !turn;
  CHECK_OK(discover(text, &at));
  snprintf(found[turn], sizeof found[turn], "%s", at.init_method);
  return found[turn];
}

#define SAME(a, b) CHECK(strcmp(meeting(a), meeting(b)) == 0)
#define OTHER(a, b) CHECK(strcmp(meeting(a), meeting(b)) != 0)
#define SLURM_ONE(rank, step) SLURM(rank, "2", rank, step) "SLURM_STEP_NUM_NODES=1 "

static void test_one_host(void) {
  char start[64], fd[512], other_fd[512];
  int a[2];
  snprintf(start, sizeof start, "unix://cddp-%u-", (unsigned)geteuid());
  CHECK(strncmp(meeting(OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9"), start, strlen(start)) == 0);
  SAME(OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9", OMPI("1", "2", "1", "2") "PMIX_NAMESPACE=9");
  OTHER(OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9", OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=8");
  OTHER(OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9 PMIX_SERVER_URI2=1",
        OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9 PMIX_SERVER_URI2=2");

  CHECK(strncmp(meeting(SLURM_ONE("0", "3")), start, strlen(start)) == 0);
  SAME(SLURM_ONE("0", "3"), SLURM_ONE("1", "3"));
  OTHER(SLURM_ONE("0", "3"), SLURM_ONE("0", "4"));
  OTHER(SLURM_ONE("0", "3"), SLURM_ONE("0", "3") "SLURM_RESTART_COUNT=1");
  CHECK(strncmp(meeting(SLURM("0", "2", "0", "3") "SLURM_NNODES=1"), start, strlen(start)) == 0);

  SAME(HYDRA("0", "2", "0", "2") "PMI_PORT=h:1", HYDRA("1", "2", "1", "2") "PMI_PORT=h:1");
  OTHER(HYDRA("0", "2", "0", "2") "PMI_PORT=h:1", HYDRA("0", "2", "0", "2") "PMI_PORT=h:2");
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, a) == 0); /* two ranks of one proxy: this process */
  snprintf(fd, sizeof fd, HYDRA("0", "2", "0", "2") "PMI_FD=%d", a[0]);
  snprintf(other_fd, sizeof other_fd, HYDRA("1", "2", "1", "2") "PMI_FD=%d", a[1]);
  CHECK(strncmp(meeting(fd), start, strlen(start)) == 0);
  SAME(fd, other_fd);
  close(a[0]);
  close(a[1]);
  variables(fd); /* a closed descriptor says nothing */
  CHECK_EQ(cddp__job_key(CDDP__LAUNCHER_HYDRA, true), 0);
}

static void test_one_host_of_others(void) {
  char start[64];
  snprintf(start, sizeof start, "unix://cddp-%u-", (unsigned)geteuid());
  CHECK(strncmp(meeting(FLUX("0", "2", "0", "1")), start, strlen(start)) == 0);
  SAME(FLUX("0", "2", "0", "1"), FLUX("1", "2", "1", "1"));
  OTHER(FLUX("0", "2", "0", "1"), FLUX("0", "2", "0", "1") "FLUX_JOB_ID=f8");
  OTHER(FLUX("0", "2", "0", "1"), FLUX("0", "2", "0", "1") "FLUX_URI=local:///tmp/other");
  CHECK(strncmp(meeting(PALS("0", "2", "0", "2")), start, strlen(start)) == 0);
  SAME(PALS("0", "2", "0", "2"), PALS("1", "2", "1", "2"));
  OTHER(PALS("0", "2", "0", "2"), PALS("0", "2", "0", "2") "PALS_APID=a-2");
  SAME(JSM("0", "2", "0", "2") "LSB_JOBID=7", JSM("1", "2", "1", "2") "LSB_JOBID=7");
  OTHER(JSM("0", "2", "0", "2") "LSB_JOBID=7", JSM("0", "2", "0", "2") "LSB_JOBID=8");
  SAME(MVAPICH("0", "2", "0", "2") "MPIRUN_ID=5", MVAPICH("1", "2", "1", "2") "MPIRUN_ID=5");
  OTHER(MVAPICH("0", "2", "0", "2") "MPIRUN_ID=5", MVAPICH("0", "2", "0", "2") "MPIRUN_ID=6");
}

/* A MASTER_PORT keeps two programs of one step apart where ranks meet without a port, too. */
static void test_port_without_address(void) {
  static const char *const one_host[] = {OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9 ",
                                         HYDRA("0", "2", "0", "2") "PMI_PORT=h:1 ",
                                         SLURM_ONE("0", "3"),
                                         FLUX("0", "2", "0", "1"),
                                         PALS("0", "2", "0", "2"),
                                         MVAPICH("0", "2", "0", "2") "MPIRUN_ID=5 ",
                                         JSM("0", "2", "0", "2") "LSB_JOBID=7 "};
  char one[512], other[512];
  size_t i;
  for (i = 0; i < sizeof one_host / sizeof *one_host; i++) {
    snprintf(one, sizeof one, "%sMASTER_PORT=29501", one_host[i]);
    snprintf(other, sizeof other, "%sMASTER_PORT=29502", one_host[i]);
    CHECK(strncmp(meeting(one), "unix://", 7) == 0);
    SAME(one, one);
    OTHER(one, other);
    OTHER(one, one_host[i]);
  }
}

static void test_master_first(void) {
  static const char *const one_host[] = {OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9 ",
                                         HYDRA("0", "2", "0", "2") "PMI_PORT=h:1 ",
                                         SLURM_ONE("0", "3"),
                                         FLUX("0", "2", "0", "1"),
                                         PALS("0", "2", "0", "2"),
                                         "RANK=0 WORLD_SIZE=2 PMIX_RANK=0 " PRTE};
  char text[512];
  size_t i;
  for (i = 0; i < sizeof one_host / sizeof *one_host; i++) {
    snprintf(text, sizeof text, "%s MASTER_ADDR=far MASTER_PORT=29501", one_host[i]);
    CHECK(strcmp(meeting(text), "tcp://far:29501") == 0);
    snprintf(text, sizeof text, "%s MASTER_ADDR=fe80::1 MASTER_PORT=29501", one_host[i]);
    CHECK(strcmp(meeting(text), "tcp://[fe80::1]:29501") == 0);
    snprintf(text, sizeof text, "%s MASTER_ADDR=[fe80::1] MASTER_PORT=29501", one_host[i]);
    CHECK(strcmp(meeting(text), "tcp://[fe80::1]:29501") == 0);
  }
}

#define SLURM_TWO(job, step)                                                  \
  "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=" job   \
  " SLURM_STEP_ID=" step " SLURM_STEP_NUM_NODES=2 SLURM_JOB_NODELIST=other "  \
  "SLURM_STEP_NODELIST=node[03-07,9],x "

static int port_of(const char *text, const char *host) {
  char start[128];
  const char *found = meeting(text);
  snprintf(start, sizeof start, "tcp://%s:", host);
  CHECK(strncmp(found, start, strlen(start)) == 0);
  return atoi(strrchr(found, ':') + 1);
}

static void test_several_hosts(void) {
  static const char *const jobs[] = {SLURM_TWO("1", "0"), SLURM_TWO("1", "1"),
                                     SLURM_TWO("999999999", "0"), SLURM_TWO("4294967295", "9999"),
                                     SLURM_TWO("18446744073709551615", "7"),
                                     SLURM_TWO("x", "0")};
  int port[6], i;
  for (i = 0; i < 6; i++) {
    port[i] = port_of(jobs[i], "node03");
    CHECK(port[i] >= 20000 && port[i] < 30000);
    CHECK_EQ(port_of(jobs[i], "node03"), port[i]);
  }
  CHECK_EQ(port_of(SLURM_TWO("1", "0") "MASTER_ADDR=m", "m"), port[0]);
  CHECK_EQ(port_of(SLURM_TWO("1", "0") "MASTER_PORT=5", "node03"), 5);
  i = port_of(OMPI("2", "4", "0", "2") "PMIX_NAMESPACE=9 MASTER_ADDR=m", "m");
  CHECK(i >= 20000 && i < 30000);
  CHECK_EQ(port_of(OMPI("0", "4", "0", "2") "PMIX_NAMESPACE=9 MASTER_ADDR=m", "m"), i);
}

/* Jobs and steps that run at the same time have ports of their own. */
static void test_ports(void) {
  static short taken[10000];
  char text[512];
  int job, step;
  CHECK(port_of(SLURM_TWO("1", "7"), "node03") != port_of(SLURM_TWO("2", "0"), "node03"));
  for (job = 0; job < 60; job++)
    for (step = 0; step < 100; step++) {
      snprintf(text, sizeof text,
               "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=%d SLURM_STEP_ID=%d "
               "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n1,n2",
               4711 + job, step);
      taken[port_of(text, "n1") % 10000]++;
    }
  for (step = 0; step < 10000; step++) CHECK(taken[step] <= 1);
}

/* The jobs that come to one address by mistake: each has keys of its own in the store there. */
#define AT "MASTER_ADDR=h MASTER_PORT=1 "
static void other_keys(const char *a, const char *b, bool other) {
  cddp__config one, two;
  CHECK_OK(discover(a, &one));
  CHECK_OK(discover(b, &two));
  test_count();
  if ((strcmp(one.run, two.run) != 0) != other)
    test_fail(__FILE__, __LINE__, "keys %s and %s for %s and %s", one.run, two.run, a, b);
}

static void test_job_names(void) {
  other_keys(AT SLURM("0", "4", "0", "0"), AT SLURM("1", "4", "1", "0"), false);
  other_keys(AT SLURM("0", "4", "0", "0"), AT SLURM("0", "4", "0", "1"), true);
  other_keys(AT SLURM("0", "4", "0", "0"), AT SLURM("0", "4", "0", "0") "SLURM_RESTART_COUNT=1",
             true);
  /* several hosts: each has a server of PMIx, all have the namespace */
  other_keys(AT OMPI("0", "4", "0", "2") "PMIX_NAMESPACE=9 PMIX_SERVER_URI2=1",
             AT OMPI("2", "4", "0", "2") "PMIX_NAMESPACE=9 PMIX_SERVER_URI2=2", false);
  other_keys(AT OMPI("0", "4", "0", "2") "PMIX_NAMESPACE=9",
             AT OMPI("0", "4", "0", "2") "PMIX_NAMESPACE=8", true);
  other_keys(AT HYDRA("0", "4", "0", "2") "PMI_JOBID=3 PMI_PORT=h:1",
             AT HYDRA("2", "4", "0", "2") "PMI_JOBID=3 PMI_PORT=i:1", false);
  other_keys(AT HYDRA("0", "4", "0", "2") "PMI_JOBID=3",
             AT HYDRA("0", "4", "0", "2") "PMI_JOBID=4", true);
  other_keys(AT HYDRA("0", "2", "0", "2") "PMI_PORT=h:1",
             AT HYDRA("0", "2", "0", "2") "PMI_PORT=h:2", true);
  other_keys(AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a",
             AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=b", true);
  other_keys(AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a",
             AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=1", true);
#define LONG "0123456789012345678901234567890123456789012345678901234567890123456789012345678"
  other_keys(AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG "9",
             AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG "8", true);
  other_keys(AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG "9a",
             AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG "9b", true);
  other_keys(AT "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG LONG "a",
             AT "RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" LONG LONG "a", false);
#undef LONG
}

/* Rank 0 is not on the first node of the list. */
#define HETEROGENEOUS                                                           \
  "SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=3 SLURM_JOB_ID=5 SLURM_STEP_ID=0 "      \
  "SLURM_STEP_NUM_NODES=2 SLURM_DISTRIBUTION=block SLURM_NODELIST=a,b "         \
  "SLURM_STEP_NODELIST=n[1,3,5,7] SLURM_JOB_NODELIST=n[1,3,5,7] %s "

static void test_rank_0_elsewhere(void) {
  static const char *const parts[] = {
      "SLURM_PACK_SIZE=2 SLURM_JOB_NODELIST_PACK_GROUP_0=n[3,7] "
      "SLURM_JOB_NODELIST_PACK_GROUP_1=n[1,5]",
      "SLURM_HET_SIZE=2 SLURM_JOB_NODELIST_HET_GROUP_0=n[3,7] "
      "SLURM_JOB_NODELIST_HET_GROUP_1=n[1,5]"};
  char text[1024];
  cddp__config at;
  int i;
  for (i = 0; i < 6; i++) { /* every rank fails, before it waits for the others */
    snprintf(text, sizeof text, HETEROGENEOUS, i % 3, parts[i / 3]);
    CHECK_IS(discover(text, &at), CDDP_INVALID_ARGUMENT);
    SAYS("heterogeneous job");
    SAYS("--export=ALL,MASTER_ADDR=HOST");
    snprintf(text, sizeof text, HETEROGENEOUS "MASTER_ADDR=n3", i % 3, parts[i / 3]);
    port_of(text, "n3");
  }
  for (i = 0; i < 2; i++) { /* each rank says so: none waits for the others */
    snprintf(text, sizeof text, SLURM_TWO("1", "0") "SLURM_DISTRIBUTION=arbitrary SLURM_NODEID=%d",
             i);
    CHECK_IS(discover(text, &at), CDDP_INVALID_ARGUMENT);
    SAYS("-m arbitrary");
    SAYS("--export=ALL,MASTER_ADDR=HOST");
    CHECK(strstr(cddp_error(), "MASTER_ADDR is") == NULL);
  }
  port_of(SLURM_TWO("1", "0") "SLURM_DISTRIBUTION=arbitrary MASTER_ADDR=m", "m");
  CHECK_IS(discover("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=1 SLURM_STEP_ID=0 "
                    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[1-2] SLURMD_NODENAME=n2",
                    &at),
           CDDP_INVALID_ARGUMENT);
  SAYS("rank 0 is on node n2");
  SAYS("SLURM_STEP_NODELIST");
  SAYS("--export=ALL,MASTER_ADDR=n2");
}

/* The texts say where a host and a port come from. */
static void test_origins(void) {
  char text[512];
  cddp_group *g = NULL;
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port;
  variables("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=1 SLURM_STEP_ID=0 CDDP_TIMEOUT_S=1 "
            "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=no-such-host.invalid,n2");
  CHECK_IS(cddp_init(&g, NULL), CDDP_NETWORK);
  SAYS("no-such-host.invalid");
  SAYS("SLURM_STEP_NODELIST");
  SAYS("set MASTER_ADDR and MASTER_PORT to change them");
  snprintf(text, sizeof text,
           "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=%d SLURM_STEP_ID=0 CDDP_TIMEOUT_S=1 "
           "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=127.0.0.1,n2",
           (int)getpid());
  port = port_of(text, "127.0.0.1");
  setenv("SLURM_PROCID", "1", 1); /* rank 0 never comes */
  CHECK_IS(cddp_init(&g, NULL), CDDP_TIMEOUT);
  SAYS("host from SLURM_STEP_NODELIST, port derived from SLURM_JOB_ID and SLURM_STEP_ID");
  setenv("SLURM_PROCID", "0", 1);
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_port = htons((uint16_t)port);
  if (bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 1) == 0) {
    CHECK_IS(cddp_init(&g, NULL), CDDP_NETWORK);
    SAYS("derived from SLURM_JOB_ID and SLURM_STEP_ID");
    SAYS("another program uses this port: choose a free one");
    SAYS("set MASTER_ADDR and MASTER_PORT to change them");
  }
  close(fd);
}

/* A newcomer's mistakes, with a text for each. At once, though a name that does not resolve would
   be asked for again. */
static void test_mistakes(void) {
  static const struct {
    const char *set, *says[3];
  } cases[] = {
      {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=192.0.2.7 MASTER_PORT=29500",
       {"192.0.2.7", "not an address of this host, where rank 0", "host from MASTER_ADDR"}},
      {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=29500", {"fe80::1", "zone", "%"}},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=29500", {"fe80::1", "zone", "%"}},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=[fe80::1] MASTER_PORT=29500", {"fe80::1", "zone", "%"}},
      {"CDDP_BACKEND=mpi", {"this build has no MPI", "CDDP_BACKEND=mpi", "unset CDDP_BACKEND"}},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost:29500 MASTER_PORT=29500",
       {"'localhost:29500' does not resolve", "without a port", "MASTER_PORT"}}};
  cddp_group *g;
  size_t i, k;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    double start = test_now();
    variables(cases[i].set);
    setenv("CDDP_TIMEOUT_S", "30", 1);
    CHECK(cddp_init(&g, NULL) != CDDP_OK);
    CHECK(test_now() - start < RANKS_WITHIN(3));
    for (k = 0; k < 3; k++) SAYS(cases[i].says[k]);
    unsetenv("CDDP_BACKEND");
  }
}

/* Rank 0 waits for others that never come: who should have started them? */
static void test_missing_ranks(void) {
  static const struct {
    const char *set, *says[3];
  } cases[] = {
      {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
       {"rank 1 of 2 (WORLD_SIZE) did not connect to 127.0.0.1:", "start it with RANK=1", ""}},
      {"RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1",
       {"ranks 1-3 of 4 (WORLD_SIZE) did not connect", "with its RANK", ""}},
      {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 TORCHELASTIC_RESTART_COUNT=0",
       {"rank 1 of the 2 that torchrun or cddprun started", "look at its output", ""}},
      {SLURM("0", "3", "0", "0") "SLURM_STEP_NUM_NODES=1",
       {"ranks 1-2 of the 3 that Slurm's srun started did not call cddp_init",
        "look at their output", "raise CDDP_TIMEOUT_S"}},
      {OMPI("0", "2", "0", "2") "PMIX_NAMESPACE=9",
       {"rank 1 of the 2 that Open MPI's mpirun started did not call cddp_init",
        "look at its output", "raise CDDP_TIMEOUT_S"}},
      {FLUX("0", "2", "0", "1"), {"rank 1 of the 2 that Flux's flux run started", "", ""}}};
  char port[16];
  cddp_group *g;
  size_t i, k;
  int fd = -1, number = 0;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK_OK(cddp__listen_loopback(&fd, &number)); /* a free port */
    close(fd);
    snprintf(port, sizeof port, "%d", number);
    variables(cases[i].set);
    setenv("CDDP_TIMEOUT_S", "0.2", 1);
    if (getenv("MASTER_ADDR") != NULL) setenv("MASTER_PORT", port, 1);
    CHECK_IS(cddp_init(&g, NULL), CDDP_TIMEOUT);
    for (k = 0; k < 3; k++) SAYS(cases[i].says[k]);
  }
}

/* Two processes are given one RANK: what keeps two jobs apart depends on where they meet. */
static int hold_rank_0(int rank, void *arg) {
  cddp_group *g;
  variables((const char *)arg);
  setenv("CDDP_TIMEOUT_S", "1", 1);
  (void)rank;
  (void)!cddp_init(&g, NULL);
  return 0;
}

static void test_two_jobs(void) {
  static const char *const sets[] = {OMPI("0", "3", "0", "3") "PMIX_NAMESPACE=9",
                                     SLURM("0", "3", "0", "0") "SLURM_STEP_NUM_NODES=1"};
  cddp_group *g;
  char copy[512];
  size_t i;
  int status;
  pid_t pid;
  for (i = 0; i < sizeof sets / sizeof *sets; i++) {
    snprintf(copy, sizeof copy, "%s", sets[i]);
    pid = ranks_fork(hold_rank_0, 0, copy);
    cddp__sleep(0.2);
    variables(sets[i]);
    setenv("CDDP_TIMEOUT_S", "1", 1);
    CHECK_IS(cddp_init(&g, NULL), CDDP_INVALID_ARGUMENT);
    SAYS("two jobs use unix://cddp-");
    SAYS("MASTER_ADDR");
    SAYS("MASTER_PORT");
    ranks_join(&pid, 1, 20, &status);
  }
}

/* A cddp_init that succeeds leaves cddp_error() as it was. */
static void test_error_stays(void) {
  static const char *const alone[] = {"",
                                      "RANK=0 WORLD_SIZE=1",
                                      "RANK=0 WORLD_SIZE=1 MASTER_PORT=x",
                                      "RANK=0 WORLD_SIZE=1 MASTER_ADDR=no-such-host.invalid",
                                      "RANK=0 WORLD_SIZE=1 MASTER_ADDR=::1:2 MASTER_PORT=1",
                                      "PMI_RANK=0 PMI_SIZE=1"};
  char before[512];
  cddp_group *g = NULL;
  size_t i;
  int again;
  for (i = 0; i < sizeof alone / sizeof *alone; i++)
    for (again = 0; again < 2; again++) {
      cddp_destroy(NULL);
      if (again) CHECK_IS(cddp_init(NULL, NULL), CDDP_INVALID_ARGUMENT);
      snprintf(before, sizeof before, "%s", cddp_error());
      variables(alone[i]);
      CHECK_OK(cddp_init(&g, NULL));
      test_count();
      if (strcmp(cddp_error(), before) != 0)
        test_fail(__FILE__, __LINE__, "after %s: %s", alone[i], cddp_error());
      cddp_destroy(g);
    }
}

static void test_agent_store(void) { /* torchrun's agent serves for its own ranks alone */
  cddp__config at;
  CHECK_OK(discover("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 TORCHELASTIC_RUN_ID=r "
                    "TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True",
                    &at));
  CHECK(at.client_only && strcmp(at.run, "cddp/r/0") == 0); /* agents count apart */
  CHECK_OK(discover(OMPI("0", "2", "0", "2") "MASTER_ADDR=h MASTER_PORT=1 "
                                             "TORCHELASTIC_USE_AGENT_STORE=True",
                    &at));
  CHECK(!at.client_only);
}

/* The secret that cddp_spawn and cddprun give the ranks of one host: for their port alone, and
   never before one of the user's. */
static void test_launcher_secret(void) {
  static const struct {
    const char *set, *secret;
  } cases[] = {{"CDDP_JOB_SECRET=29501:abc", "abc"}, {"CDDP_JOB_SECRET=29502:abc", ""},
               {"CDDP_JOB_SECRET=2950:abc", ""},     {"CDDP_JOB_SECRET=29501", ""},
               {"CDDP_JOB_SECRET=29501:", ""},       {"TORCHELASTIC_RESTART_COUNT=0", ""}};
  size_t i;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    cddp__config at;
    char text[256];
    snprintf(text, sizeof text, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 %s",
             cases[i].set);
    CHECK_OK(discover(text, &at));
    CHECK(strcmp(at.secret, cases[i].secret) == 0);
    CHECK(at.launcher_secret == (cases[i].secret[0] != 0));
    setenv("CDDP_SECRET", "mine", 1);
    CHECK_OK(discover(text, &at));
    CHECK(strcmp(at.secret, "mine") == 0 && !at.launcher_secret);
    unsetenv("CDDP_SECRET");
  }
}

/* A rank beyond the others, with and without CDDP_JOIN. */
static void test_rank_beyond(void) {
  cddp_group_desc d;
  cddp_group *g;
  memset(&d, 0, sizeof d);
  d.world_size = 2;
  d.rank = 2;
  d.timeout_s = 0.3;
  d.init_method = "tcp://127.0.0.1:1";
  variables("");
  CHECK_IS(cddp_init(&g, &d), CDDP_INVALID_ARGUMENT);
  SAYS("rank is 2 but world_size is 2; ranks go from 0 to 1");
  setenv("CDDP_JOIN", "0", 1);
  CHECK_IS(cddp_init(&g, &d), CDDP_INVALID_ARGUMENT);
  SAYS("rank is 2 but world_size is 2; ranks go from 0 to 1");
  setenv("CDDP_JOIN", "1", 1);
  CHECK(cddp_init(&g, &d) != CDDP_INVALID_ARGUMENT); /* no job runs there */
  d.rank = -1;
  CHECK_IS(cddp_init(&g, &d), CDDP_INVALID_ARGUMENT);
  variables("RANK=2 WORLD_SIZE=2 CDDP_JOIN=1");
  CHECK_EQ(cddp_launcher_rank(), 2);
  setenv("CDDP_JOIN", "0", 1);
  CHECK_EQ(cddp_launcher_rank(), 0); /* which cddp_init explains */
  setenv("CDDP_JOIN", "2", 1);
  CHECK_EQ(cddp_launcher_rank(), 0);
  unsetenv("CDDP_JOIN");
}

/* --- CDDP_LISTEN_FD --------------------------------------------------------------------------- */

static void listen_case(const char *rank, int fd, int port, bool taken, bool lost) {
  char text[256];
  cddp__config at;
  snprintf(text, sizeof text,
           "RANK=%s WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d CDDP_LISTEN_FD=%d", rank,
           port, fd);
  CHECK_OK(discover(text, &at));
  CHECK_EQ(at.listen_fd, taken ? fd : -1);
  CHECK_EQ(at.listen_fd_lost, lost);
}

static void test_listen_fd(void) {
  struct sockaddr_in a;
  socklen_t size = sizeof a;
  int fd = -1, port = 0, idle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_OK(cddp__listen_loopback(&fd, &port));
  listen_case("0", fd, port, true, false);
  listen_case("1", fd, port, false, false);
  listen_case("0", fd, port == 1 ? 2 : 1, false, true); /* another port */
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  CHECK(bind(idle, (struct sockaddr *)&a, sizeof a) == 0);
  CHECK(getsockname(idle, (struct sockaddr *)&a, &size) == 0);
  listen_case("0", idle, ntohs(a.sin_port), false, true); /* does not listen */
  listen_case("0", STDERR_FILENO, port, false, true);   /* no socket, or none that listens */
  close(fd);
  listen_case("0", fd, port, false, true); /* closed on the way here */
  close(idle);
}

/* --- starts ----------------------------------------------------------------------------------- */

enum { OPENMPIS, HYDRAS, SLURMS, MVAPICHS, FLUXES, PALSES, JSMS, STARTERS };

typedef struct job {
  int launcher, id, ranks;
  int sockets[2]; /* what Hydra passes to its ranks */
} job;

static void rank_variables(const job *j, int rank) {
  static const char *const formats[] = {
      "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=%d OMPI_COMM_WORLD_LOCAL_RANK=%d "
      "OMPI_COMM_WORLD_LOCAL_SIZE=%d PMIX_NAMESPACE=%d%d ",
      "PMI_RANK=%d PMI_SIZE=%d MPI_LOCALRANKID=%d MPI_LOCALNRANKS=%d PMI_ID=%d PMI_FD=%d ",
      "SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=%d SLURM_LOCALID=%d SLURM_STEP_NUM_NODES=1 "
      "SLURM_NTASKS=%d SLURM_JOB_ID=%d SLURM_STEP_ID=%d ",
      "MV2_COMM_WORLD_RANK=%d MV2_COMM_WORLD_SIZE=%d MV2_COMM_WORLD_LOCAL_RANK=%d "
      "MV2_COMM_WORLD_LOCAL_SIZE=%d MPIRUN_ID=%d PMI_PORT=h:%d ",
      "FLUX_TASK_RANK=%d FLUX_JOB_SIZE=%d FLUX_TASK_LOCAL_ID=%d FLUX_JOB_NNODES=1 PMI_SIZE=%d "
      "FLUX_JOB_ID=f%d%d ",
      "PALS_RANKID=%d PMI_SIZE=%d PALS_LOCAL_RANKID=%d PALS_LOCAL_SIZE=%d PALS_APID=%d-%d ",
      "JSM_NAMESPACE_RANK=%d JSM_NAMESPACE_SIZE=%d JSM_NAMESPACE_LOCAL_RANK=%d "
      "JSM_NAMESPACE_LOCAL_SIZE=%d LSB_JOBID=%d PMIX_NAMESPACE=%d "};
  const char *format = formats[j->launcher];
  int own = j->launcher == HYDRAS ? j->sockets[rank & 1] : 5;
  char text[1024];
  size_t n;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  n = (size_t)snprintf(text, sizeof text, format, rank, j->ranks, rank, j->ranks, j->id, own);
#pragma GCC diagnostic pop
  snprintf(text + n, sizeof text - n, "CDDP_TIMEOUT_S=30");
  variables(text);
}

static int start_rank(int rank, void *arg) {
  const job *j = (const job *)arg;
  int64_t sum[2], turn;
  cddp_group *g;
  rank_variables(j, rank);
  for (turn = 0; turn < 3; turn++) { /* groups one after the other meet in one place */
    sum[0] = rank + 1;
    sum[1] = j->id;
    CHECK_EQ(cddp_launcher_rank(), rank);
    CHECK_OK(cddp_init(&g, NULL));
    if (g == NULL) return 1;
    CHECK(cddp_rank(g) == rank && cddp_world_size(g) == j->ranks);
    CHECK(cddp_local_rank(g) == rank && cddp_local_world_size(g) == j->ranks);
    CHECK_OK(cddp_all_reduce(g, sum, 2, CDDP_I64, CDDP_SUM, NULL));
    CHECK_EQ(sum[0], j->ranks * (j->ranks + 1) / 2);
    CHECK_EQ(sum[1], j->ranks * j->id); /* all are of this job */
    cddp_destroy(g);
  }
  return 0;
}

/* The launcher's process of one job: for Hydra the maker of the ranks' PMI_FD. */
static int start_job(int index, void *arg) {
  job j = ((const job *)arg)[index];
  pid_t pid[8];
  int status[8], i;
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, j.sockets) == 0);
  for (i = 0; i < j.ranks; i++) pid[i] = ranks_fork(start_rank, i, &j);
  ranks_join(pid, j.ranks, 60, status);
  CHECK(ranks_exited_well(status, j.ranks));
  return 0;
}

/* Two jobs of each launcher, of different sizes, all at once. */
static void test_starts(void) {
  enum { JOBS = 2 * STARTERS };
  job jobs[JOBS];
  pid_t pid[JOBS];
  int status[JOBS], i;
  memset(jobs, 0, sizeof jobs);
  for (i = 0; i < JOBS; i++) {
    jobs[i].launcher = i / 2;
    jobs[i].id = 1000 + (int)getpid() + i;
    jobs[i].ranks = 2 + i % 2;
    pid[i] = ranks_fork(start_job, i, jobs);
  }
  ranks_join(pid, JOBS, 90, status);
  for (i = 0; i < JOBS; i++) CHECK_EQ(status[i], 0);
}

/* --- somebody else has the name --------------------------------------------------------------- */

static int take_name(const char *init_method, bool listens) {
  struct sockaddr_un a;
  const char *name = init_method + strlen("unix://");
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  memset(&a, 0, sizeof a);
  a.sun_family = AF_UNIX;
  snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%s", name);
  if (bind(fd, (struct sockaddr *)&a,
           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))) != 0)
    perror("bind");
  if (listens && listen(fd, 8) != 0) perror("listen");
  return fd;
}

static cddp_result init_as(const job *j, int rank, double *seconds) {
  double start = test_now();
  cddp_group *g = NULL;
  cddp_result r;
  rank_variables(j, rank);
  setenv("CDDP_TIMEOUT_S", "1", 1);
  r = cddp_init(&g, NULL);
  *seconds = test_now() - start;
  cddp_destroy(g);
  return r;
}

static void init_job(job *j, cddp__config *at) {
  cddp_group_desc d;
  memset(j, 0, sizeof *j);
  memset(&d, 0, sizeof d);
  j->launcher = OPENMPIS;
  j->id = (int)getpid();
  j->ranks = 2;
  rank_variables(j, 0);
  CHECK_OK(cddp__discover(at, &d));
}

/* The caller gives the ranks, or all: no text names variables that nobody has set. */
static void test_desc(void) {
  cddp_group_desc d;
  cddp_group *g;
  memset(&d, 0, sizeof d);
  d.world_size = 2;
  variables("");
  CHECK_IS(cddp_init(&g, &d), CDDP_INVALID_ARGUMENT);
  SAYS("desc.world_size is set but MASTER_ADDR is not");
  d.init_method = "tcp://192.0.2.7:29500";
  CHECK_IS(cddp_init(&g, &d), CDDP_NETWORK);
  SAYS("not an address of this host");
  CHECK(strstr(cddp_error(), "MASTER_") == NULL);
  d.init_method = "tcp://no-such-host.invalid:29500";
  CHECK_IS(cddp_init(&g, &d), CDDP_NETWORK);
  SAYS("does not resolve");
  CHECK(strstr(cddp_error(), "MASTER_") == NULL);
}

/* The process that holds a rank's name does not accept: its pid is not known. */
static void test_full_claim(void) {
  cddp__config at;
  cddp__host *host = cddp__host_create(NULL, NULL, 2, 0);
  cddp__address a;
  int fd, calls[64], n = 0;
  double seconds;
  job j;
  init_job(&j, &at);
  CHECK(host != NULL);
  CHECK_OK(cddp__job_info_create(host, &at));
  a = cddp__rank_socket(host->job_info, "", 0);
  CHECK_EQ(cddp__listen_address(&a, &fd), 0);
  CHECK_EQ(listen(fd, 1), 0);
  while (n < 64 && cddp__connect_address(&a, cddp__now(), &calls[n]) == 0) n++;
  CHECK(n > 0 && n < 64);
  CHECK_IS(init_as(&j, 0, &seconds), CDDP_INVALID_ARGUMENT);
  SAYS("rank 0 is taken twice, by a process on ");
  while (n > 0) cddp__close_fd(&calls[--n]);
  cddp__close_fd(&fd);
  cddp__host_release(host);
}

/* A listener of this user that nobody serves: a stopped job, or another program. */
static void test_name_taken(void) {
  cddp__config at;
  double seconds;
  job j;
  int fd;
  init_job(&j, &at);
  fd = take_name(at.init_method, true);
  CHECK_IS(init_as(&j, 0, &seconds), CDDP_NETWORK);
  SAYS("cannot listen on the abstract Unix socket @cddp-");
  SAYS("MASTER_ADDR and MASTER_PORT");
  CHECK(seconds < RANKS_WITHIN(0.9));
  CHECK_IS(init_as(&j, 1, &seconds), CDDP_TIMEOUT); /* it may still answer: until the deadline */
  SAYS(at.init_method + strlen("unix://"));
  CHECK(seconds < RANKS_WITHIN(5));
  close(fd);
  fd = take_name(at.init_method, false); /* bound only */
  CHECK_IS(init_as(&j, 1, &seconds), CDDP_TIMEOUT);
  SAYS("rank 0");
  close(fd);
}

static int listen_as_nobody(int end, void *arg) {
  char byte = 0;
  if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0) return 1;
  if (take_name((const char *)arg, true) < 0) return 1;
  if (write(end, &byte, 1) != 1) return 1;
  return read(end, &byte, 1) != 0; /* until the test has ended */
}

static void test_another_user(void) {
  cddp__config at;
  double seconds;
  int ends[2], status = -1;
  char byte;
  pid_t pid;
  job j;
  if (geteuid() != 0) {
    fprintf(stderr, "  test_another_user: left out, only root can be two users\n");
    return;
  }
  init_job(&j, &at);
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  fflush(NULL);
  pid = fork();
  if (pid == 0) {
    close(ends[0]);
    _exit(listen_as_nobody(ends[1], at.init_method));
  }
  close(ends[1]);
  CHECK(read(ends[0], &byte, 1) == 1);
  CHECK_IS(init_as(&j, 1, &seconds), CDDP_NETWORK);
  SAYS("another user's process listens there");
  SAYS("MASTER_PORT");
  CHECK(seconds < RANKS_WITHIN(0.9)); /* no waiting */
  close(ends[0]);
  ranks_join(&pid, 1, 10, &status);
  CHECK_EQ(status, 0);
}

/* And the other way round: rank 0 does not talk to another user's process that calls it. */
static int call_as_nobody(const char *init_method) {
  cddp__address a;
  char byte;
  int fd, i;
  if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0) return 1;
  cddp__unix_name(&a, init_method + strlen("unix://"));
  for (i = 0; i < 10000; i++) {
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, &a.any, a.size) == 0) break;
    close(fd);
    fd = -1;
    ranks_sleep(0.001);
  }
  if (fd < 0) return 2;
  if (send(fd, cddp__greeting, 5, MSG_NOSIGNAL) < 0) return 0;
  byte = CDDP__STORE_GETNUMKEYS;
  if (send(fd, &byte, 1, MSG_NOSIGNAL) < 0) return 0;
  return recv(fd, &byte, 1, 0) > 0 ? 3 : 0; /* hung up on: no answer */
}

static void test_another_user_calls(void) {
  cddp__config at;
  double seconds;
  int status = -1;
  pid_t pid;
  job j;
  if (geteuid() != 0) return;
  init_job(&j, &at);
  fflush(NULL);
  pid = fork();
  if (pid == 0) _exit(call_as_nobody(at.init_method));
  CHECK_IS(init_as(&j, 0, &seconds), CDDP_TIMEOUT); /* rank 1 never comes */
  ranks_join(&pid, 1, 20, &status);
  CHECK_EQ(status, 0);
}

int main(void) {
  RUN(test_ranks);
  RUN(test_given_size);
  RUN(test_errors);
  RUN(test_pty);
  RUN(test_node_lists);
  RUN(test_one_host);
  RUN(test_one_host_of_others);
  RUN(test_port_without_address);
  RUN(test_master_first);
  RUN(test_several_hosts);
  RUN(test_ports);
  RUN(test_job_names);
  RUN(test_rank_0_elsewhere);
  RUN(test_origins);
  RUN(test_mistakes);
  RUN(test_missing_ranks);
  RUN(test_two_jobs);
  RUN(test_error_stays);
  RUN(test_agent_store);
  RUN(test_launcher_secret);
  RUN(test_rank_beyond);
  RUN(test_listen_fd);
  RUN(test_starts);
  RUN(test_desc);
  RUN(test_full_claim);
  RUN(test_name_taken);
  RUN(test_another_user);
  RUN(test_another_user_calls);
  return TEST_END();
}
