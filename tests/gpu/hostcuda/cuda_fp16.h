/* cuda_fp16.h - a test double: see cuda_runtime.h and kernels.hpp. */
#include "cuda_runtime.h"
