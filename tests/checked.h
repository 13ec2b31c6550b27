/* checked.h - the compiler includes this file first in the variant asan: a false CDDP_ASSERT of
   cddp.h ends the process. The undefined-behaviour sanitizer reports the line. */
#define CDDP_ASSERT(c) ((c) ? (void)0 : __builtin_unreachable())
