/* setup.h - settings of each test program with GPUs: for sanitizers, and small chunks. It follows
   inside.h and ranks.h. */
#ifndef SETUP_H
#define SETUP_H

#if RANKS_TSAN /* a rank with threads would linger for a second at its end */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0"; }
#endif

/* A thread of the double may be on its way out when its process ends. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:__cxa_thread_atexit_impl"; }

/* Small models have many chunks, and a checkpoint is copied in many pieces. */
__attribute__((constructor)) static void small_chunks(void) {
  inside_file_staging = 12288;
  inside_warm_up = (size_t)1 << 18;
  inside_shard_chunk = 700;
}

#endif
