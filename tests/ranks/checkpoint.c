/* cddp_save and cddp_load: what is refused, what survives, and which ranks hear of a failure.

   Files are written, changed byte by byte or field by field, and read again: a damaged file is an
   error with a text, never another model. A rank is killed while it saves, a limit ends the file,
   two processes write at once, descriptors or locks are missing: the old file must stay whole.
   Optimizer states, sampler positions and shards resume on another number of ranks. Files of
   Python's safetensors: tests/peers/safetensors.sh. */
#include "../../cddp.h"

#include "../ranks.h"

#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/un.h>

static char directory[256], path[300], temporary[304];

#define UID_A 61234 /* two users that nobody is, for tests that root runs */
#define UID_B 61235

static void write_bytes(const char *name, const void *bytes, size_t n) {
  FILE *f = fopen(name, "wb");
  CHECK(f != NULL && fwrite(bytes, 1, n, f) == n);
  if (f != NULL) CHECK(fclose(f) == 0);
}

static size_t read_bytes(const char *name, unsigned char *bytes, size_t n) {
  FILE *f = fopen(name, "rb");
  size_t got = f != NULL ? fread(bytes, 1, n, f) : 0;
  CHECK(f != NULL);
  if (f != NULL) fclose(f);
  return got;
}

/* A file with this JSON, N being its length + more, and so many bytes of data. */
static void write_file(const char *json, size_t size, int64_t more, size_t data) {
  static unsigned char bytes[8192];
  uint64_t n = (uint64_t)((int64_t)size + more);
  int i;
  CHECK(8 + size + data <= sizeof bytes);
  for (i = 0; i < 8; i++) bytes[i] = (unsigned char)(n >> (8 * i));
  memcpy(bytes + 8, json, size);
  for (n = 0; n < data; n++) bytes[8 + size + n] = (unsigned char)n;
  write_bytes(path, bytes, 8 + size + data);
}

static cddp_result open_and_close(void) {
  cddp_safetensors *f;
  cddp_result r = cddp_safetensors_open(&f, path);
  CHECK((r == CDDP_OK) == (f != NULL));
  cddp_safetensors_close(f);
  return r;
}

#define T(dtype, shape, begin, end) \
  "{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"
#define A(body) "{\"a\":{" body "}}"
#define REST "\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]"

static void test_accepted(void) {
  static const struct { const char *json; size_t data; int tensors; } files[] = {
      {"{}", 0, 0},
      {"{}   \n", 0, 0},
      {"{\"__metadata__\":null}", 0, 0},
      {"{\"__metadata__\":{\"a\":\"b\"}}", 0, 0},
      {"{\"a\":" T("F32", "2,3", 0, 24) "}", 24, 1},
      {"{ \"a\" : " T("F32", "", 0, 4) " }", 4, 1},
      {"{\"b\":" T("U8", "2", 3, 5) ",\"a\":" T("BOOL", "3", 0, 3) "}", 5, 2},
      {"{\"a\":" T("F32", "0", 4, 4) ",\"b\":" T("I32", "1", 0, 4) "}", 4, 2},
      {"{\"a\":" T("F32", "0", 0, 0) ",\"b\":" T("F32", "5,0", 0, 0) "}", 0, 2},
      {"{\"a\":" T("F32", "0,4611686018427387904,4611686018427387904", 0, 0) "}", 0, 1},
      {"{\"a\":" T("F4", "2", 0, 1) ",\"b\":" T("F6_E2M3", "4", 1, 4) "}", 4, 2},
      {"{\"a\":" T("C64", "1", 0, 8) ",\"b\":" T("F8_E4M3", "1", 8, 9) "}", 9, 2},
      {"{\"\\u00e9\\ud83d\\ude00\\n\\\"\":" T("U8", "1", 0, 1) "}", 1, 1},
      {"{\"\xc3\xa9\xf0\x9f\x98\x80\":" T("U8", "1", 0, 1) "}", 1, 1},
      {"{\"\":" T("U8", "1", 0, 1) "}", 1, 1},
  };
  cddp_safetensors *f;
  size_t i;
  for (i = 0; i < sizeof files / sizeof *files; i++) {
    write_file(files[i].json, strlen(files[i].json), 0, files[i].data);
    CHECK_OK(cddp_safetensors_open(&f, path));
    CHECK_EQ(cddp_safetensors_count(f), files[i].tensors);
    cddp_safetensors_close(f);
  }
  write_file("{\"\\u00e9\\ud83d\\ude00\\n\\\"\":" T("U8", "1", 0, 1) "}", 74, 0, 1);
  CHECK_OK(cddp_safetensors_open(&f, path));
  CHECK_EQ(cddp_safetensors_find(f, "\xc3\xa9\xf0\x9f\x98\x80\n\""), 0);
  cddp_safetensors_close(f);
}

static void test_refused(void) {
  static const struct { const char *json, *says; size_t data; } files[] = {
      {"", "must begin with {", 0},
      {" {}", "must begin with {", 0},
      {"[]", "must begin with {", 0},
      {"{", "string is expected", 0},
      {"{}{}", "only spaces", 0},
      {"{},", "only spaces", 0},
      {"{\"a\"}", "colon", 0},
      {"{\"a\":}", "object", 0},
      {"{\"a\":[]}", "object", 0},
      {"{\"a\":{}}", "needs dtype", 0},
      {"{\"a\":" T("U8", "4", 0, 4), "comma or a }", 4},
      {"{\"a\":" T("U8", "4", 0, 4) ",}", "string is expected", 4},
      {A("\"dtype\":\"U8\",\"shape\":[4]"), "needs dtype", 4},
      {A("\"dtype\":\"U8\",\"data_offsets\":[0,4]"), "needs dtype", 4},
      {A("\"shape\":[4],\"data_offsets\":[0,4]"), "needs dtype", 4},
      {A("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4]"), "needs dtype", 4},
      {A("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]"), "too long", 4},
      {A("\"dtype\":5,\"shape\":[4],\"data_offsets\":[0,4]"), "string", 4},
      {A("\"dtype\":\"U8\",\"shape\":4,\"data_offsets\":[0,4]"), "list", 4},
      {A(REST ",\"dtype\":\"U8\""), "dtype occurs twice", 4},
      {A(REST ",\"shape\":[4]"), "shape occurs twice", 4},
      {A(REST ",\"data_offsets\":[0,4]"), "data_offsets occurs twice", 4},
      {"{\"a\":" T("U8", "-4", 0, 4) "}", "whole number", 4},
      {"{\"a\":" T("U8", "4.0", 0, 4) "}", "comma", 4},
      {"{\"a\":" T("U8", "4e0", 0, 4) "}", "comma", 4},
      {"{\"a\":" T("U8", "04", 0, 4) "}", "whole number", 4},
      {"{\"a\":" T("U8", "4,", 0, 4) "}", "whole number", 4},
      {"{\"a\":" T("U8", "18446744073709551616", 0, 4) "}", "exceeds 64 bits", 4},
      {"{\"a\":" T("U9", "4", 0, 4) "}", "dtype", 4},
      {"{\"a\":" T("f32", "1", 0, 4) "}", "dtype", 4},
      {"{\"a\":" T("F4", "3", 0, 1) "}", "whole bytes", 1},
      {"{\"a\":" T("F32", "4611686018427387904,4611686018427387904,0", 0, 0) "}", "64 bits", 0},
      {"{\"a\":" T("F64", "2305843009213693952", 0, 0) "}", "64 bits", 0},
      {"{\"a\":" T("F32", "2", 0, 4) "}", "takes 8 bytes by its shape", 4},
      {"{\"a\":" T("U8", "4", 4, 0) "}", "data_offsets", 4},
      {"{\"a\":" T("U8", "4", 0, 4) "}", "take 4 bytes, but 5", 5},
      {"{\"a\":" T("U8", "4", 0, 4) "}", "it is truncated", 3},
      {"{\"a\":" T("U8", "4", 1, 5) "}", "no tensor contains", 5},
      {"{\"a\":" T("U8", "4", 0, 4) ",\"b\":" T("U8", "4", 5, 9) "}", "no tensor contains", 9},
      {"{\"a\":" T("U8", "4", 0, 4) ",\"b\":" T("U8", "4", 3, 7) "}", "inside another", 7},
      {"{\"a\":" T("U8", "4", 0, 4) ",\"b\":" T("U8", "4", 0, 4) "}", "inside another", 4},
      {"{\"a\":" T("U8", "4", 0, 4) ",\"b\":" T("U8", "0", 2, 2) "}", "begins at byte 2", 4},
      {"{\"a\":" T("U8", "0", 0, 0) ",\"a\":" T("U8", "4", 0, 4) "}", "named \"a\"", 4},
      {"{\"a\":" T("U8", "0", 0, 0) ",\"\\u0061\":" T("U8", "4", 0, 4) "}", "named \"a\"", 4},
      {"{\"__metadata__\":{\"a\":1}}", "string", 0},
      {"{\"__metadata__\":[]}", "object of strings", 0},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "twice", 0},
      {"{\"__metadata__\":{\"a\":\"\",\"b\":\"\",\"a\":\"\"}}", "\"a\" twice", 0},
      {"{\"a\nb\":" T("U8", "1", 0, 1) "}", "control character", 1},
      {"{\"a\\x\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"a\\u0000\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"a\\ud83d\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"a\\ude00\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"a\\ud83d\\u0041\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"a\\u12\":" T("U8", "1", 0, 1) "}", "escape", 1},
      {"{\"\xff\":" T("U8", "1", 0, 1) "}", "UTF-8", 1},
      {"{\"\xc0\x80\":" T("U8", "1", 0, 1) "}", "UTF-8", 1},
      {"{\"\xe0\x9f\xbf\":" T("U8", "1", 0, 1) "}", "UTF-8", 1},
      {"{\"\xed\xa0\x80\":" T("U8", "1", 0, 1) "}", "UTF-8", 1},
      {"{\"\xf4\x90\x80\x80\":" T("U8", "1", 0, 1) "}", "UTF-8", 1},
      {A(REST ",\"x\":1"), "\"x\" is not a field", 4},
      {A("\"\\u001b\":[{}]," REST), "\"\\x1b\" is not a field", 4},
  };
  char deep[2048];
  size_t i;
  for (i = 0; i < sizeof files / sizeof *files; i++) {
    write_file(files[i].json, strlen(files[i].json), 0, files[i].data);
    CHECK_IS(open_and_close(), CDDP_IO);
    CHECK(strstr(cddp_error(), path) != NULL);
    if (strstr(cddp_error(), files[i].says) == NULL) fprintf(stderr, "%s\n", files[i].json);
    CHECK(strstr(cddp_error(), files[i].says) != NULL);
  }
  write_file("{}\0\0", 4, 0, 0);
  CHECK_IS(open_and_close(), CDDP_IO);
  snprintf(deep, sizeof deep, "{\"a\":{\"shape\":");
  for (i = 0; i < 1000; i++) strcat(deep, "[");
  write_file(deep, strlen(deep), 0, 0);
  CHECK_IS(open_and_close(), CDDP_IO);
  snprintf(deep, sizeof deep, "{\"\\u001b[31m\\u007f\":%s,\"b\":%s}", T("U8", "1", 7, 8), "{}");
  write_file(deep, strlen(deep), 0, 1);
  CHECK_IS(open_and_close(), CDDP_IO);
  CHECK(strchr(cddp_error(), 27) == NULL); /* names do not reach a terminal raw */
}

static void test_lengths(void) {
  static const char json[] = "{\"a\":" T("U8", "4", 0, 4) "}";
  static unsigned char bytes[256], changed[256];
  static const int64_t wrong[] = {-1, 1, 5, 1000, INT64_MAX - 100, INT64_MIN};
  size_t n, i;
  for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    write_file(json, strlen(json), wrong[i], 4);
    CHECK_IS(open_and_close(), CDDP_IO);
  }
  write_file(json, strlen(json), 100000001 - (int64_t)strlen(json), 4);
  CHECK_IS(open_and_close(), CDDP_IO);
  CHECK(strstr(cddp_error(), "100000001") != NULL);
  CHECK(truncate(path, 200000000) == 0); /* the bytes are there: still too long */
  CHECK_IS(open_and_close(), CDDP_IO);
  CHECK(strstr(cddp_error(), "at most 100000000") != NULL);
  write_file(json, strlen(json), 0, 4);
  CHECK_OK(open_and_close());
  n = read_bytes(path, bytes, sizeof bytes);
  for (i = 0; i < n; i++) {
    write_bytes(path, bytes, i);
    CHECK_IS(open_and_close(), CDDP_IO);
    CHECK(strstr(cddp_error(), "it is truncated") != NULL);
  }
  for (i = 0; i < n - 4; i++) { /* any header byte changed: no crash, and a reason */
    memcpy(changed, bytes, n);
    changed[i] ^= (unsigned char)(1u << i % 8);
    write_bytes(path, changed, n);
    if (open_and_close() != CDDP_OK) CHECK(strstr(cddp_error(), path) != NULL);
  }
  unlink(path);
  CHECK_IS(open_and_close(), CDDP_IO);
  CHECK(strstr(cddp_error(), "No such file") != NULL);
  CHECK(mkfifo(path, 0600) == 0);
  CHECK_IS(open_and_close(), CDDP_IO);
  CHECK(strstr(cddp_error(), "not a regular file") != NULL);
  unlink(path);
}

/* What safetensors 0.8.0's save_file writes for {"w": [[1, 2, 3], [4, 5, 6]] as float32, "n": 7 as
   int64, "b": [True, False]}, and ours of the same but b; the bytes were read once. */
static void test_bytes(void) {
  static const char theirs[] =
      "{\"n\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},\"w\":{\"dtype\":\"F32\","
      "\"shape\":[2,3],\"data_offsets\":[8,32]},\"b\":{\"dtype\":\"BOOL\",\"shape\":[2],"
      "\"data_offsets\":[32,34]}}   ";
  static const char ours[] =
      "\x90\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"},\"n\":{\"dtype\":\"I64\","
      "\"shape\":[1],\"data_offsets\":[0,8]},\"w\":{\"dtype\":\"F32\","
      "\"shape\":[2,3],\"data_offsets\":[8,32]}}";
  unsigned char bytes[512];
  int64_t n = 7;
  float w[6] = {1, 2, 3, 4, 5, 6}, back[6];
  cddp_param p[2] = {{"w", w, NULL, 6, CDDP_F32}, {"n", &n, NULL, 1, CDDP_I64}};
  cddp_shape shapes[2] = {{2, {2, 3}}, {0, {0}}};
  cddp_checkpoint_desc d;
  cddp_safetensors *f;
  cddp_tensor_info t;
  memset(&d, 0, sizeof d);
  write_file(theirs, sizeof theirs - 1, 0, 34);
  CHECK_OK(cddp_safetensors_open(&f, path));
  CHECK_OK(cddp_safetensors_get(f, cddp_safetensors_find(f, "w"), &t));
  CHECK(t.dims == 2 && t.shape[0] == 2 && t.shape[1] == 3 && t.count == 6 && t.bytes == 24);
  CHECK(strcmp(t.type, "F32") == 0 && t.dtype == CDDP_F32 && t.begin == 8);
  CHECK_OK(cddp_safetensors_get(f, 2, &t));
  CHECK(strcmp(t.name, "b") == 0 && strcmp(t.type, "BOOL") == 0 && t.dtype == -1);
  CHECK_OK(cddp_safetensors_read(f, 2, bytes, 2));
  CHECK(bytes[0] == 32 && bytes[1] == 33);
  CHECK_IS(cddp_safetensors_read(f, 2, bytes, 3), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_safetensors_read(f, 3, bytes, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_safetensors_get(f, -1, &t), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_safetensors_find(f, "x"), -1);
  CHECK(cddp_safetensors_metadata(f, "format") == NULL);
  CHECK(truncate(path, 100) == 0); /* under our hands */
  CHECK_IS(cddp_safetensors_read(f, 2, bytes, 2), CDDP_IO);
  cddp_safetensors_close(f);
  d.shapes = shapes;
  CHECK_OK(cddp_save(NULL, path, p, 2, &d));
  CHECK_EQ(read_bytes(path, bytes, sizeof bytes), 8 + 144 + 32);
  CHECK(memcmp(bytes, ours, sizeof ours - 1) == 0);
  memcpy(back, bytes + 8 + 144 + 8, sizeof back);
  CHECK(memcmp(back, w, sizeof w) == 0);
}

/* Every dtype, names and strings that need care, no elements, no tensors. */
static void test_round_trip(void) {
  static const cddp_dtype dtypes[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16,
                                      CDDP_I8,  CDDP_U8,  CDDP_I32, CDDP_I64};
  static const char *const names[] = {"layer.0.weight", "\"quoted\\\"", "tab\t\x01", "\xc3\xa9",
                                      "", "a/b", "optimizer", "z"};
  static unsigned char data[8][8 * 38], back[8][8 * 38];
  cddp_metadata m[3] = {{"note", "line\n\"2\""}, {"empty", ""}, {"\xc3\xa9", "\xf0\x9f\x98\x80"}};
  cddp_metadata asked[4] = {{"\xc3\xa9", NULL}, {"missing", "x"}, {"empty", NULL}, {"note", NULL}};
  cddp_param p[9], q[9];
  cddp_checkpoint_desc d;
  char text[64];
  size_t i, k;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  for (i = 0; i < 8; i++) {
    for (k = 0; k < sizeof data[i]; k++) data[i][k] = (unsigned char)ranks_mix(i, k, 1);
    p[i].name = names[i];
    p[i].data = data[i];
    p[i].count = 30 + i;
    p[i].dtype = dtypes[i];
  }
  p[8].name = "none"; /* no elements, no memory */
  memcpy(q, p, sizeof q);
  for (i = 0; i < 8; i++) q[i].data = back[i];
  d.metadata = m;
  d.metadata_count = 3;
  CHECK_OK(cddp_save(NULL, path, p, 9, &d));
  CHECK(access(temporary, F_OK) != 0);
  d.metadata = asked;
  d.metadata_count = 4;
  d.text = text;
  d.text_size = 14;
  CHECK_IS(cddp_load(NULL, path, q, 9, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "need 15") != NULL);
  CHECK(back[0][0] == 0);
  d.text_size = 15;
  CHECK_OK(cddp_load(NULL, path, q, 9, &d));
  for (i = 0; i < 8; i++)
    CHECK(memcmp(back[i], data[i], p[i].count * cddp_dtype_size(dtypes[i])) == 0 &&
          back[i][p[i].count * cddp_dtype_size(dtypes[i])] == 0);
  CHECK(strcmp(asked[0].value, m[2].value) == 0 && asked[1].value == NULL);
  CHECK(asked[2].value[0] == 0 && strcmp(asked[3].value, m[0].value) == 0);
  CHECK_OK(cddp_save(NULL, path, NULL, 0, NULL));
  CHECK_OK(cddp_load(NULL, path, NULL, 0, NULL));
}

/* A file of somebody else's: shapes, dtypes and names of its own. */
static void test_foreign(void) {
  float w[6], extra[2] = {9, 9};
  double wide[6];
  int32_t whole[6];
  uint16_t half[6];
  cddp_param p[2] = {{"w", w, NULL, 6, CDDP_F32}, {"extra", extra, NULL, 2, CDDP_F32}};
  cddp_shape shape = {2, {3, 2}};
  cddp_checkpoint_desc d;
  int i;
  memset(&d, 0, sizeof d);
  for (i = 0; i < 6; i++) w[i] = (float)i + 0.25f;
  d.shapes = &shape;
  CHECK_OK(cddp_save(NULL, path, p, 1, &d));
  p[0].data = wide;
  p[0].dtype = CDDP_F64;
  CHECK_OK(cddp_load(NULL, path, p, 1, NULL)); /* any shape with that count, any float */
  p[0].data = half;
  p[0].dtype = CDDP_BF16;
  CHECK_OK(cddp_load(NULL, path, p, 1, NULL));
  for (i = 0; i < 6; i++)
    CHECK(wide[i] == i + 0.25 && ranks_from_bf16(half[i]) == (float)i + 0.25f);
  CHECK_OK(cddp_load(NULL, path, p, 1, &d));
  shape.size[0] = 2;
  shape.size[1] = 3;
  CHECK_IS(cddp_load(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "\"w\" has shape [3,2] in the file, the parameter [2,3]") != NULL);
  p[0].data = whole;
  p[0].dtype = CDDP_I32;
  CHECK_IS(cddp_load(NULL, path, p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "F32 in the file, the parameter is i32") != NULL);
  p[0].data = w;
  p[0].dtype = CDDP_F32;
  p[0].count = 5;
  CHECK_IS(cddp_load(NULL, path, p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "6 elements in the file, the parameter has 5") != NULL);
  p[0].count = 6;
  CHECK_IS(cddp_load(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "no tensor \"extra\"") != NULL);
  CHECK_IS(cddp_load(NULL, path, p, 0, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "\"w\", which is not among the parameters") != NULL);
  memset(&d, 0, sizeof d);
  d.partial = true;
  memset(w, 0, sizeof w);
  CHECK_OK(cddp_load(NULL, path, p, 2, &d));
  CHECK(w[5] == 5.25f && extra[0] == 9);
  CHECK_OK(cddp_load(NULL, path, p + 1, 1, &d));
}

/* A scalar has the shape [] and is not taken for one dimension of one. */
static void test_scalar(void) {
  static unsigned char bytes[256], again[256];
  double x = 3;
  cddp_param p = {"s", NULL, NULL, 1, CDDP_F64};
  cddp_shape shape = {-1, {0}};
  cddp_checkpoint_desc d;
  cddp_safetensors *f;
  cddp_tensor_info t;
  size_t n;
  p.data = &x;
  memset(&d, 0, sizeof d);
  d.shapes = &shape;
  CHECK_OK(cddp_save(NULL, path, &p, 1, &d));
  n = read_bytes(path, bytes, sizeof bytes - 1);
  CHECK(strstr((const char *)bytes + 8, "\"shape\":[],") != NULL);
  CHECK_OK(cddp_safetensors_open(&f, path));
  CHECK_OK(cddp_safetensors_get(f, 0, &t));
  CHECK(t.dims == 0 && t.count == 1 && t.bytes == 8);
  cddp_safetensors_close(f);
  x = 0;
  CHECK_OK(cddp_load(NULL, path, &p, 1, &d));
  CHECK_OK(cddp_save(NULL, path, &p, 1, &d));
  CHECK(read_bytes(path, again, sizeof again) == n && memcmp(bytes, again, n) == 0 && x == 3);
  shape.dims = 1;
  shape.size[0] = 1;
  CHECK_IS(cddp_load(NULL, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "has shape [] in the file, the parameter [1]") != NULL);
  shape.dims = -1;
  p.count = 2;
  CHECK_IS(cddp_save(NULL, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "does not match its count, 2") != NULL);
}

/* SGD's momentum is nothing that AdamW could go on with. */
static void test_other_optimizer(void) {
  float w[2] = {1, 2}, grad[2] = {1, 1};
  cddp_param p = {"w", w, grad, 2, CDDP_F32};
  cddp_sgd_desc sgd;
  cddp_adamw_desc adamw;
  cddp_optim *first, *second;
  cddp_checkpoint_desc d;
  memset(&sgd, 0, sizeof sgd);
  memset(&adamw, 0, sizeof adamw);
  memset(&d, 0, sizeof d);
  sgd.lr = 0.5;
  sgd.momentum = 0.9;
  adamw.lr = 0.25;
  CHECK_OK(cddp_sgd_create(&first, &p, 1, &sgd));
  CHECK_OK(cddp_adamw_create(&second, &p, 1, &adamw));
  CHECK_OK(cddp_optim_step(first));
  d.optim = first;
  CHECK_OK(cddp_save(NULL, path, &p, 1, &d));
  w[0] = 7;
  d.optim = second;
  CHECK_IS(cddp_load(NULL, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "optimizer.momentum_buffer.w") != NULL);
  CHECK(strstr(cddp_error(), "this optimizer's states") != NULL);
  CHECK(w[0] == 7 && cddp_optim_lr(second) == 0.25);
  d.partial = true;
  CHECK_OK(cddp_load(NULL, path, &p, 1, &d));
  CHECK(w[0] == 0.5f && cddp_optim_lr(second) == 0.5);
  d.partial = false;
  CHECK_OK(cddp_optim_step(second));
  CHECK_OK(cddp_save(NULL, path, &p, 1, &d));
  d.optim = first;
  CHECK_IS(cddp_load(NULL, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "optimizer.exp_avg") != NULL);
  d.optim = NULL;
  CHECK_OK(cddp_load(NULL, path, &p, 1, &d)); /* without an optimizer its states are left */
  cddp_optim_destroy(first);
  cddp_optim_destroy(second);
}

static void test_arguments(void) {
  float w[2] = {1, 2};
  cddp_param p[2] = {{"w", w, NULL, 2, CDDP_F32}, {"w", w, NULL, 2, CDDP_F32}};
  cddp_shape shape = {2, {3, 2}};
  cddp_metadata m = {"cddp.x", "1"};
  cddp_checkpoint_desc d;
  cddp_safetensors *f;
  memset(&d, 0, sizeof d);
  unlink(path);
  CHECK_IS(cddp_save(NULL, NULL, p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_save(NULL, "", p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_save(NULL, path, NULL, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_save(NULL, path, p, -1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_save(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT); /* the name twice */
  CHECK(strstr(cddp_error(), "two tensors are named \"w\"") != NULL);
  p[0].name = "__metadata__";
  CHECK_IS(cddp_save(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  p[0].name = "\xff";
  CHECK_IS(cddp_save(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "UTF-8") != NULL);
  p[0].name = NULL;
  CHECK_IS(cddp_save(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  p[0].name = "v";
  p[0].data = NULL;
  CHECK_IS(cddp_save(NULL, path, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  p[0].data = w;
  d.shapes = &shape;
  CHECK_IS(cddp_save(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "does not match its count, 2") != NULL);
  shape.dims = 9;
  CHECK_IS(cddp_save(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  d.shapes = NULL;
  d.metadata = &m;
  d.metadata_count = 1;
  CHECK_IS(cddp_save(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  m.key = "x";
  m.value = NULL;
  CHECK_IS(cddp_save(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  m.key = NULL;
  CHECK_IS(cddp_save(NULL, path, p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(access(path, F_OK) != 0 && access(temporary, F_OK) != 0);
  CHECK_IS(cddp_safetensors_open(NULL, path), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_safetensors_open(&f, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_safetensors_count(NULL), -1);
  CHECK_IS(cddp_safetensors_read(NULL, 0, w, sizeof w), CDDP_INVALID_ARGUMENT);
  CHECK(strncmp(cddp_error(), "cddp_safetensors_read: ", 23) == 0); /* and no other function */
  CHECK(strstr(cddp_error() + 23, "cddp_") == NULL);
  cddp_safetensors_close(NULL);
}

/* --- training that goes on ------------------------------------------------------------------ */

enum { WEIGHTS = 3001, BIASES = 7, STEPS = 9, SAMPLES = 101 };

typedef struct run {
  int begin, end;         /* steps of this part */
  bool fused, shared;     /* cddp_ddp_step, or wait and step; weights from cddp_alloc */
  const char *from, *to;  /* checkpoints, NULL: none */
  float weights[WEIGHTS + BIASES], momentum[WEIGHTS];
} run;

/* Gradients are small whole numbers, the same on each rank: their mean is exact with any number of
   ranks, so that every run must come to the same bits. */
static int train(cddp_group *g, void *arg) {
  run *job = (run *)arg;
  float *w = (float *)(job->shared ? cddp_alloc(g, sizeof job->weights)
                                   : calloc(1, sizeof job->weights));
  cddp_param p[2] = {{"weight", NULL, NULL, WEIGHTS, CDDP_F32},
                     {"bias", NULL, NULL, BIASES, CDDP_F32}};
  cddp_sgd_desc o;
  cddp_checkpoint_desc d;
  cddp_optim *sgd = NULL;
  cddp_ddp *ddp = NULL;
  uint16_t half[WEIGHTS];
  void *copies[2] = {half, NULL};
  int step, i;
  if (w == NULL) return 1;
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  p[0].data = w;
  p[1].data = w + WEIGHTS;
  for (i = 0; i < WEIGHTS + BIASES; i++) w[i] = (float)i * 0.001f + (float)cddp_rank(g);
  o.lr = job->from != NULL ? 77 : 0.1; /* that of the file counts */
  o.momentum = 0.9;
  o.copies = copies;
  o.copy_dtype = CDDP_BF16;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, NULL));
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  d.optim = sgd;
  if (job->from != NULL) CHECK_OK(cddp_load(g, job->from, p, 2, &d));
  CHECK(ranks_is_copy(CDDP_BF16, half, w, WEIGHTS));
  CHECK(cddp_optim_lr(sgd) == (job->from != NULL ? 0.05 : 0.1));
  for (step = job->begin; step < job->end; step++) {
    for (i = 0; i < WEIGHTS + BIASES; i++) {
      float *grad = (float *)(i < WEIGHTS ? p[0].grad : p[1].grad);
      grad[i < WEIGHTS ? i : i - WEIGHTS] += (float)(ranks_mix((uint64_t)step, (uint64_t)i, 3) % 9);
    }
    CHECK_OK(cddp_ddp_ready(ddp, 1));
    CHECK_OK(cddp_ddp_ready(ddp, 0));
    if (job->fused) CHECK_OK(cddp_ddp_step(ddp, sgd));
    else CHECK(cddp_ddp_wait(ddp) == CDDP_OK && cddp_optim_step(sgd) == CDDP_OK &&
               cddp_optim_zero_grad(sgd) == CDDP_OK);
    if (step == 2) CHECK_OK(cddp_optim_set_lr(sgd, 0.05));
    if (job->to != NULL) CHECK_OK(cddp_save(g, job->to, p, 2, &d)); /* changes nothing */
  }
  if (cddp_rank(g) == cddp_world_size(g) - 1) memcpy(job->weights, w, sizeof job->weights);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  if (job->shared) cddp_free(g, w);
  else free(w);
  return 0;
}

static void read_momentum(run *job) {
  cddp_safetensors *f;
  int i;
  CHECK_OK(cddp_safetensors_open(&f, path));
  i = cddp_safetensors_find(f, "optimizer.momentum_buffer.weight");
  CHECK_OK(cddp_safetensors_read(f, i, job->momentum, sizeof job->momentum));
  CHECK_EQ(cddp_safetensors_count(f), 5);
  cddp_safetensors_close(f);
}

static void test_resume(void) {
  static const int worlds[] = {1, 2, 3, 4};
  run *whole = (run *)ranks_shared(sizeof *whole), *part = (run *)ranks_shared(sizeof *part);
  int i, k;
  whole->end = STEPS;
  whole->fused = whole->shared = true;
  whole->to = path;
  CHECK_OK(ranks_run(train, whole, 2, true));
  read_momentum(whole);
  for (i = 0; i < 4; i++) {
    for (k = 0; k < 2; k++) { /* fused steps, then unfused ones; and the other way round */
      memset(part, 0, sizeof *part);
      part->to = path;
      part->end = 4;
      part->fused = k == 0;
      part->shared = i % 2 == 0;
      CHECK_OK(ranks_run(train, part, worlds[3 - i], i != 1));
      part->from = path;
      part->begin = 4;
      part->end = STEPS;
      part->fused = k != 0 || i == 2;
      CHECK_OK(ranks_run(train, part, worlds[i], i != 2));
      CHECK(memcmp(part->weights, whole->weights, sizeof whole->weights) == 0);
      read_momentum(part);
      CHECK(memcmp(part->momentum, whole->momentum, sizeof whole->momentum) == 0);
    }
  }
  munmap(whole, sizeof *whole);
  munmap(part, sizeof *part);
}

enum { SHARDS = 6, WIDE = 515, BATCH = 3 };

typedef struct sharded {
  uint64_t end; /* steps */
  bool adamw, load, save;
  uint64_t began; /* steps that the cddp_ddp had taken when the loop began */
  float weights[WIDE];
} sharded;

/* The loop that does not depend on the number of ranks. The gradients have no exact sums, so only
   one order of them comes to these bits. */
static int train_shards(cddp_group *g, void *arg) {
  sharded *job = (sharded *)arg;
  float w[WIDE], *grad;
  cddp_param p = {"weight", NULL, NULL, WIDE, CDDP_F32};
  cddp_ddp_desc k;
  cddp_sgd_desc sgd;
  cddp_adamw_desc adamw;
  cddp_sampler_desc o;
  cddp_sampler sampler;
  cddp_checkpoint_desc d;
  cddp_ddp *ddp = NULL;
  uint64_t t;
  int shard, i;
  memset(&k, 0, sizeof k);
  memset(&sgd, 0, sizeof sgd);
  memset(&adamw, 0, sizeof adamw);
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  for (i = 0; i < WIDE; i++) w[i] = (float)i * 0.001f;
  p.data = w;
  k.shards = SHARDS;
  sgd.lr = adamw.lr = 0.01;
  sgd.momentum = 0.9;
  adamw.weight_decay = 0.01;
  o.dataset_size = 100;
  o.world_size = SHARDS;
  o.shuffle = true;
  CHECK_OK(cddp_sampler_init(&sampler, &o));
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &k));
  if (job->adamw) CHECK_OK(cddp_adamw_create(&d.optim, &p, 1, &adamw));
  else CHECK_OK(cddp_sgd_create(&d.optim, &p, 1, &sgd));
  d.ddp = ddp;
  d.sampler = &sampler;
  if (job->load) CHECK_OK(cddp_load(g, path, &p, 1, &d));
  if (cddp_rank(g) == 0) job->began = cddp_ddp_steps(ddp);
  grad = (float *)p.grad;
  for (t = cddp_ddp_steps(ddp); t < job->end; t = cddp_ddp_steps(ddp)) {
    cddp_sampler_set_epoch(&sampler, t / 4);
    while (cddp_ddp_next_shard(ddp, &shard)) {
      size_t samples[BATCH], s;
      CHECK_EQ(cddp_sampler_batch(&sampler, shard, t % 4, BATCH, samples), BATCH);
      for (s = 0; s < BATCH; s++)
        for (i = 0; i < WIDE; i++)
          grad[i] += (float)(ranks_mix(samples[s], (uint64_t)i, t) % 1000003) * 1e-6f;
      CHECK_OK(cddp_ddp_ready(ddp, 0));
    }
    CHECK_OK(cddp_ddp_step(ddp, d.optim));
  }
  if (job->save) CHECK_OK(cddp_save(g, path, &p, 1, &d));
  if (cddp_rank(g) == 0) memcpy(job->weights, w, sizeof w);
  cddp_optim_destroy(d.optim);
  cddp_ddp_destroy(ddp);
  cddp_sampler_destroy(&sampler);
  return 0;
}

static void test_resume_shards(void) {
  static const int worlds[][2] = {{1, 3}, {2, 1}, {3, 6}, {4, 2}, {6, 5}};
  sharded *whole = (sharded *)ranks_shared(sizeof *whole);
  sharded *part = (sharded *)ranks_shared(sizeof *part);
  int i, adamw;
  for (adamw = 0; adamw < 2; adamw++) {
    memset(whole, 0, sizeof *whole);
    whole->adamw = adamw != 0;
    whole->end = 9;
    CHECK_OK(ranks_run(train_shards, whole, 2, true));
    for (i = 0; i < 5; i++) {
      memset(part, 0, sizeof *part);
      part->adamw = adamw != 0;
      part->end = 5; /* in the middle of an epoch */
      part->save = true;
      CHECK_OK(ranks_run(train_shards, part, worlds[i][0], i % 2 == 0));
      CHECK_EQ(part->began, 0);
      part->end = 9;
      part->load = true;
      CHECK_OK(ranks_run(train_shards, part, worlds[i][1], i % 2 == 0));
      CHECK_EQ(part->began, 5);
      CHECK(memcmp(part->weights, whole->weights, sizeof whole->weights) == 0);
    }
  }
  munmap(whole, sizeof *whole);
  munmap(part, sizeof *part);
}

/* A step count is loaded where shards are as many as the file's, or not set on one side. */
static int count_steps(cddp_group *g, void *arg) {
  float w = 1;
  cddp_param p = {"weight", NULL, NULL, 1, CDDP_F32};
  cddp_ddp_desc k;
  cddp_checkpoint_desc d;
  cddp_ddp *ddp;
  int i, shard;
  (void)arg;
  p.data = &w;
  memset(&d, 0, sizeof d);
  for (i = 0; i < 4; i++) { /* saves with 4; tries to load with 3; without, saves; with 5 */
    memset(&k, 0, sizeof k);
    k.shards = i == 0 ? 4 : i == 1 ? 3 : i == 2 ? 0 : 5;
    p.grad = NULL;
    CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &k));
    d.ddp = ddp;
    if (i == 0) {
      CHECK_OK(cddp_save(g, path, &p, 1, NULL));
      CHECK_IS(cddp_load(g, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
      CHECK(strstr(cddp_error(), "cddp.ddp.steps") != NULL);
      d.partial = true;
      CHECK_OK(cddp_load(g, path, &p, 1, &d));
      d.partial = false;
      while (cddp_ddp_next_shard(d.ddp, &shard)) CHECK_OK(cddp_ddp_ready(d.ddp, 0));
      CHECK_OK(cddp_ddp_wait(d.ddp));
      CHECK_OK(cddp_save(g, path, &p, 1, &d));
    } else if (i == 1) {
      CHECK_IS(cddp_load(g, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
      CHECK(strstr(cddp_error(), "cddp.ddp.shards is 4 in the file, 3 here") != NULL);
      CHECK_EQ(cddp_ddp_steps(d.ddp), 0);
    } else {
      CHECK_OK(cddp_load(g, path, &p, 1, &d));
      CHECK_EQ(cddp_ddp_steps(d.ddp), 1);
      CHECK_OK(cddp_save(g, path, &p, 1, &d));
      if (cddp_rank(g) == 1) d.ddp = NULL;
      CHECK_IS(cddp_save(g, path, &p, 1, &d), CDDP_MISMATCH);
    }
    cddp_ddp_destroy(ddp);
  }
  return 0;
}

static void test_step_count(void) { CHECK_OK(ranks_run(count_steps, NULL, 3, true)); }

/* In the middle of training: back to the checkpoint, with momentum in pieces before and after. */
static int go_back(cddp_group *g, void *arg) {
  float *w = (float *)cddp_alloc(g, 64 * sizeof *w), want[64];
  cddp_param p = {"w", NULL, NULL, 64, CDDP_F32};
  cddp_sgd_desc o;
  cddp_checkpoint_desc d;
  cddp_optim *sgd = NULL;
  cddp_ddp *ddp = NULL;
  int round, step, i;
  (void)arg;
  if (w == NULL) return 1;
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  memset(w, 0, 64 * sizeof *w);
  p.data = w;
  o.lr = 0.5;
  o.momentum = 0.5;
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&sgd, &p, 1, &o));
  d.optim = sgd;
  CHECK_OK(cddp_save(g, path, &p, 1, &d)); /* before any momentum */
  for (round = 0; round < 3; round++) {
    for (step = 0; step < 4; step++) {
      for (i = 0; i < 64; i++) ((float *)p.grad)[i] += (float)(i + step);
      CHECK_OK(cddp_ddp_ready(ddp, 0));
      CHECK_OK(cddp_ddp_step(ddp, sgd));
    }
    if (round == 0) memcpy(want, w, sizeof want);
    CHECK(memcmp(want, w, sizeof want) == 0);
    CHECK_OK(cddp_load(g, path, &p, 1, &d));
    CHECK(w[5] == 0);
  }
  d.optim = NULL;
  CHECK_OK(cddp_load(g, path, &p, 1, &d)); /* the weights alone */
  CHECK_OK(cddp_save(g, path, &p, 1, &d));
  d.optim = sgd;
  CHECK_IS(cddp_load(g, path, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "optimizer.lr") != NULL);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, w);
  return 0;
}

static void test_go_back(void) { CHECK_OK(ranks_run(go_back, NULL, 2, true)); }

/* Other bytes in place of a tensor's in the file. */
static void patch(const char *name, const void *value, size_t n) {
  unsigned char size[8];
  uint64_t at = 0;
  cddp_safetensors *f;
  cddp_tensor_info t;
  int i, fd = open(path, O_WRONLY | O_CLOEXEC);
  CHECK_OK(cddp_safetensors_open(&f, path));
  CHECK_OK(cddp_safetensors_get(f, cddp_safetensors_find(f, name), &t));
  CHECK(read_bytes(path, size, 8) == 8 && t.bytes == n);
  for (i = 7; i >= 0; i--) at = at << 8 | size[i];
  CHECK(pwrite(fd, value, n, (off_t)(8 + at + t.begin)) == (ssize_t)n);
  close(fd);
  cddp_safetensors_close(f);
}

enum { LONG = 600, SHORT = 30 };

/* A model in a group, or g NULL, and one like it that this rank trains alone and that loads
   nothing. They have the same bits as long as their steps, states and rates are the same. */
typedef struct twins {
  float w[2][LONG + SHORT], grad[LONG + SHORT];
  cddp_param p[2][2];
  cddp_optim *optim[2];
  cddp_ddp *ddp;
} twins;

static void create_twins(twins *t, cddp_group *g) {
  cddp_adamw_desc o;
  int i;
  memset(&o, 0, sizeof o);
  memset(t, 0, sizeof *t);
  o.lr = 0.25;
  for (i = 0; i < 2; i++) {
    cddp_param p[2] = {{"a", NULL, NULL, LONG, CDDP_F32}, {"b", NULL, NULL, SHORT, CDDP_F32}};
    p[0].data = t->w[i], p[1].data = t->w[i] + LONG;
    p[0].grad = t->grad, p[1].grad = t->grad + LONG;
    memcpy(t->p[i], p, sizeof p);
    if (i == 0 && g != NULL) CHECK_OK(cddp_ddp_create(&t->ddp, g, t->p[0], 2, NULL));
    CHECK_OK(cddp_adamw_create(&t->optim[i], t->p[i], 2, &o));
  }
}

static bool same_after_step(twins *t) {
  int i;
  for (i = 0; i < LONG + SHORT; i++) t->grad[i] = (float)(i + 1); /* on each rank */
  CHECK_OK(cddp_optim_step(t->optim[1]));
  if (t->ddp == NULL) CHECK_OK(cddp_optim_step(t->optim[0]));
  else CHECK(cddp_ddp_ready(t->ddp, 1) == CDDP_OK && cddp_ddp_ready(t->ddp, 0) == CDDP_OK &&
             cddp_ddp_step(t->ddp, t->optim[0]) == CDDP_OK);
  return memcmp(t->w[0], t->w[1], sizeof t->w[0]) == 0;
}

static const struct no_number { const char *tensor, *says; double value; } no_numbers[] = {
    {"optimizer.step.a", "\"optimizer.step.a\" is nan", NAN},
    {"optimizer.step.b", "\"optimizer.step.b\" is nan", NAN},
    {"optimizer.step.b", "is -1", -1},
    {"optimizer.step.b", "is 3.35544e+07", 0x1p25},
    {"optimizer.lr", "learning rate is nan", NAN},
    {"optimizer.lr", "learning rate is -1", -1},
    {"optimizer.lr", "learning rate is inf", INFINITY}};

/* Loads the state of a step before, with one such number: refused, and nothing goes back. */
static void refuse_number(twins *t, cddp_group *g, const struct no_number *bad) {
  bool lr = strcmp(bad->tensor, "optimizer.lr") == 0;
  float steps = (float)bad->value;
  cddp_checkpoint_desc d;
  int i;
  memset(&d, 0, sizeof d);
  d.optim = t->optim[0];
  CHECK_OK(cddp_optim_set_lr(d.optim, 0.25));
  CHECK_OK(cddp_save(g, path, t->p[0], 2, &d));
  if (g == NULL || cddp_rank(g) == 0) /* who reads it */
    patch(bad->tensor, lr ? (const void *)&bad->value : &steps, lr ? 8 : 4);
  for (i = 0; i < 2; i++) CHECK_OK(cddp_optim_set_lr(t->optim[i], 0.5));
  CHECK(same_after_step(t));
  CHECK_IS(cddp_load(g, path, t->p[0], 2, &d), CDDP_IO);
  CHECK(strstr(cddp_error(), bad->says) != NULL);
  CHECK(memcmp(t->w[0], t->w[1], sizeof t->w[0]) == 0 && cddp_optim_lr(d.optim) == 0.5);
  CHECK(same_after_step(t));
}

static int load_no_numbers(cddp_group *g, void *arg) {
  twins t;
  size_t i;
  (void)arg;
  create_twins(&t, g);
  CHECK(same_after_step(&t));
  for (i = 0; i < sizeof no_numbers / sizeof *no_numbers; i++) refuse_number(&t, g, &no_numbers[i]);
  cddp_optim_destroy(t.optim[0]);
  cddp_optim_destroy(t.optim[1]);
  cddp_ddp_destroy(t.ddp);
  return 0;
}

/* A step count or learning rate that is none: refused, with all as it was on each rank. */
static void test_no_numbers(void) {
  CHECK_EQ(load_no_numbers(NULL, NULL), 0);
  CHECK_OK(ranks_run(load_no_numbers, NULL, 2, true));
  CHECK_OK(ranks_run(load_no_numbers, NULL, 3, false));
}

/* --- the sampler ------------------------------------------------------------------------------ */

typedef struct deal {
  int take; /* indices a rank takes, then saves; -1: loads, takes the rest */
  uint64_t seed;
  unsigned char seen[SAMPLES];
} deal;

static int draw(cddp_group *g, void *arg) {
  deal *job = (deal *)arg;
  cddp_sampler_desc o;
  cddp_checkpoint_desc d;
  cddp_sampler s;
  size_t index, n = 0;
  int i;
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  o.dataset_size = SAMPLES;
  o.rank = cddp_rank(g);
  o.world_size = cddp_world_size(g);
  o.seed = job->seed;
  o.shuffle = o.exact = true;
  d.sampler = &s;
  CHECK_OK(cddp_sampler_init(&s, &o));
  if (job->take < 0) {
    CHECK_OK(cddp_load(g, path, NULL, 0, &d));
    CHECK_EQ(cddp_sampler_epoch(&s), 5);
  }
  cddp_sampler_set_epoch(&s, 5);
  for (i = 0; i != job->take && cddp_sampler_next(&s, &index); i++)
    __atomic_add_fetch(&job->seen[index], 1, __ATOMIC_SEQ_CST);
  if (job->take >= 0) CHECK_OK(cddp_save(g, path, NULL, 0, &d));
  else CHECK_EQ(cddp_sampler_size(&s), i);
  cddp_sampler_set_epoch(&s, 5); /* the whole epoch */
  while (cddp_sampler_next(&s, &index)) n++;
  CHECK_EQ(n, cddp_sampler_size(&s));
  CHECK(n == SAMPLES / (size_t)o.world_size || n == SAMPLES / (size_t)o.world_size + 1);
  cddp_sampler_destroy(&s);
  return 0;
}

static void test_sampler(void) {
  deal job;
  int before, after, i;
  for (before = 1; before < 5; before++) {
    for (after = 1; after < 5; after++) {
      memset(&job, 0, sizeof job);
      job.take = 7 * after - 5; /* one taken before the end of an epoch or after it */
      CHECK_OK(ranks_run(draw, &job, before, true));
      job.take = -1;
      CHECK_OK(ranks_run(draw, &job, after, true));
      for (i = 0; i < SAMPLES; i++) CHECK_EQ(job.seen[i], 1);
    }
  }
}

/* PyTorch's way of even shares: what is left is dealt out as an uninterrupted epoch would. */
static void test_sampler_even(void) {
  cddp_sampler_desc o;
  cddp_checkpoint_desc d;
  cddp_sampler whole, part;
  size_t i, a, b, batch[2], again[2];
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  o.dataset_size = 10;
  o.world_size = 4;
  o.rank = 3;
  o.shuffle = true;
  for (i = 0; i <= 3; i++) {
    CHECK_OK(cddp_sampler_init(&whole, &o));
    CHECK_OK(cddp_sampler_init(&part, &o));
    for (a = 0; a < i; a++) CHECK(cddp_sampler_next(&whole, &b));
    CHECK_EQ(cddp_sampler_batch(&whole, 1, 0, 2, batch), 2); /* is not counted */
    d.sampler = &whole;
    CHECK_OK(cddp_save(NULL, path, NULL, 0, &d));
    d.sampler = &part;
    CHECK_OK(cddp_load(NULL, path, NULL, 0, &d));
    CHECK_EQ(cddp_sampler_size(&part), 3 - i);
    CHECK_EQ(cddp_sampler_batch(&part, 1, 0, 2, again), 2); /* of the epoch, not of what is left */
    CHECK(memcmp(batch, again, sizeof batch) == 0);
    while (cddp_sampler_next(&whole, &a)) CHECK(cddp_sampler_next(&part, &b) && a == b);
    CHECK(!cddp_sampler_next(&part, &b));
    cddp_sampler_destroy(&part);
    cddp_sampler_destroy(&whole);
  }
  o.seed = 1; /* another order: at the end of an epoch, but not in the middle */
  CHECK_OK(cddp_sampler_init(&part, &o));
  d.sampler = &part;
  CHECK_OK(cddp_load(NULL, path, NULL, 0, &d));
  CHECK_EQ(cddp_sampler_size(&part), 0);
  o.dataset_size = 20; /* nor does the rest of a larger dataset belong to that epoch */
  CHECK_OK(cddp_sampler_init(&part, &o));
  CHECK_OK(cddp_load(NULL, path, NULL, 0, &d));
  CHECK_EQ(cddp_sampler_size(&part), 0);
  o.dataset_size = 10;
  o.drop_last = true; /* an epoch of 8 samples ends too: no other number of ranks gets the rest */
  for (i = 0; i < 4; i++) {
    CHECK_OK(cddp_sampler_init(&whole, &o));
    while (cddp_sampler_next(&whole, &b)) {}
    d.sampler = &whole;
    CHECK_OK(cddp_save(NULL, path, NULL, 0, &d));
    if (i > 0) o.rank = 0, o.world_size = (int)i, o.dataset_size = i == 3 ? 20 : 10;
    CHECK_OK(cddp_sampler_init(&part, &o));
    d.sampler = &part;
    CHECK_OK(cddp_load(NULL, path, NULL, 0, &d));
    CHECK_EQ(cddp_sampler_size(&part), 0);
    CHECK_OK(cddp_save(NULL, path, NULL, 0, &d)); /* again before the next epoch */
    CHECK_OK(cddp_load(NULL, path, NULL, 0, &d));
    CHECK_EQ(cddp_sampler_size(&part), 0);
    o.dataset_size = 10, o.rank = 3, o.world_size = 4;
  }
  o.drop_last = false;
  o.seed = 0;
  CHECK_OK(cddp_sampler_init(&whole, &o));
  CHECK(cddp_sampler_next(&whole, &b));
  d.sampler = &whole;
  CHECK_OK(cddp_save(NULL, path, NULL, 0, &d));
  cddp_sampler_destroy(&whole);
  o.seed = 1;
  CHECK_OK(cddp_sampler_init(&part, &o));
  d.sampler = &part;
  CHECK_IS(cddp_load(NULL, path, NULL, 0, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp.sampler.seed is 0 in the file, 1 here") != NULL);
  cddp_sampler_destroy(&part);
}

/* One that cddp_sampler_init has not made, or has refused to make. */
static void test_sampler_zeroed(void) {
  cddp_sampler_desc o;
  cddp_checkpoint_desc d;
  cddp_sampler made, zeroed;
  memset(&o, 0, sizeof o);
  memset(&d, 0, sizeof d);
  memset(&zeroed, 0, sizeof zeroed);
  o.dataset_size = 10;
  CHECK_OK(cddp_sampler_init(&made, &o));
  d.sampler = &made;
  CHECK_OK(cddp_save(NULL, path, NULL, 0, &d));
  d.sampler = &zeroed;
  CHECK_IS(cddp_save(NULL, path, NULL, 0, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_sampler_init") != NULL);
  CHECK_IS(cddp_load(NULL, path, NULL, 0, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_sampler_init") != NULL);
  cddp_sampler_destroy(&made);
}

/* --- failures --------------------------------------------------------------------------------- */

/* All ranks hear the same, and the group lives on. */
static int disagree(cddp_group *g, void *arg) {
  float w[4] = {1, 2, 3, 4}, one = 1;
  cddp_param p = {"w", NULL, NULL, 4, CDDP_F32};
  char missing[320];
  int rank = cddp_rank(g);
  (void)arg;
  p.data = w;
  CHECK_OK(cddp_save(g, path, &p, 1, NULL));
  snprintf(missing, sizeof missing, "%s/none/x", directory);
  CHECK_IS(cddp_save(g, missing, &p, 1, NULL), CDDP_IO);
  CHECK(strstr(cddp_error(), "No such file") != NULL && strstr(cddp_error(), missing) != NULL);
  CHECK((strstr(cddp_error(), "rank 0: ") != NULL) == (rank != 0));
  CHECK_IS(cddp_load(g, missing, &p, 1, NULL), CDDP_IO);
  p.name = rank == 1 ? "v" : "w";
  CHECK_IS(cddp_load(g, path, &p, 1, NULL), CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "rank 1 passed other parameters") != NULL);
  CHECK_IS(cddp_save(g, path, &p, 1, NULL), CDDP_MISMATCH);
  p.name = "w";
  p.data = rank == 2 ? NULL : w;
  CHECK_IS(cddp_load(g, path, &p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "\"w\" has data NULL") != NULL);
  CHECK((strstr(cddp_error(), "rank 2: ") != NULL) == (rank != 2));
  p.data = w;
  p.count = 3;
  CHECK_IS(cddp_load(g, path, &p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "4 elements in the file") != NULL);
  p.count = 4;
  w[rank] = 99; /* rank 0's values are saved, all ranks get them */
  w[1] = rank == 0 ? 2 : w[1];
  CHECK_OK(cddp_load(g, path, &p, 1, NULL));
  CHECK(w[0] == 1 && w[1] == 2 && w[2] == 3 && w[3] == 4);
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK(one == 3);
  return 0;
}

static void test_all_ranks_hear(void) {
  CHECK_OK(ranks_run(disagree, NULL, 3, true));
  CHECK_OK(ranks_run(disagree, NULL, 3, false));
}

/* A rank that dies instead of saving: the others hear of it, the old file stays. */
static int die(int rank, void *arg) {
  float w[4] = {5, 5, 5, 5};
  cddp_param p = {"w", NULL, NULL, 4, CDDP_F32};
  cddp_group *g;
  (void)arg;
  p.data = w;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_load(g, path, &p, 1, NULL));
  if (rank == 2) raise(SIGKILL);
  w[0] = 6;
  CHECK_IS(cddp_save(g, path, &p, 1, NULL), CDDP_PEER_LOST);
  CHECK(strstr(cddp_error(), "cddp_save") != NULL && strstr(cddp_error(), "rank 2") != NULL);
  CHECK_IS(cddp_load(g, path, &p, 1, NULL), CDDP_PEER_LOST);
  CHECK(w[0] == 6);
  cddp_destroy(g);
  return 0;
}

static cddp_result save_value(float value, size_t count) { /* an array of it */
  float *w = (float *)malloc(count * sizeof *w);
  cddp_param p = {"w", NULL, NULL, 0, CDDP_F32};
  cddp_result r;
  size_t i;
  if (w == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < count; i++) w[i] = value;
  p.data = w;
  p.count = count;
  r = cddp_save(NULL, path, &p, 1, NULL);
  free(w);
  return r;
}

/* The file is whole and has one value everywhere: which; -1: it is not. */
static float held(size_t count) {
  float *w = (float *)malloc(count * sizeof *w), value = -1;
  cddp_param p = {"w", w, NULL, 0, CDDP_F32};
  size_t i = 0;
  p.count = count;
  if (w != NULL && cddp_load(NULL, path, &p, 1, NULL) == CDDP_OK) {
    while (i < count && w[i] == w[0]) i++;
    if (i == count) value = w[0];
  }
  free(w);
  return value;
}

static bool holds(float value, size_t count) { return held(count) == value; }

static void limit_files(rlim_t bytes) {
  struct rlimit limit;
  limit.rlim_cur = limit.rlim_max = bytes;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

/* Writes stop short at 10,000 bytes, then fail, with the signal that ends a process by default: at
   its default, ignored and blocked. */
static int no_space(int rank, void *arg) {
  sigset_t xfsz, after, pending;
  sigemptyset(&xfsz);
  sigaddset(&xfsz, SIGXFSZ);
  (void)arg;
  if (rank == 1) signal(SIGXFSZ, SIG_IGN);
  if (rank == 2) pthread_sigmask(SIG_BLOCK, &xfsz, NULL);
  limit_files(10000);
  CHECK_IS(save_value(2, 10000), CDDP_IO);
  CHECK(strstr(cddp_error(), "write, at byte 10000: File too large") != NULL);
  CHECK(strstr(cddp_error(), "ulimit -f") != NULL);
  pthread_sigmask(SIG_BLOCK, NULL, &after);
  CHECK(sigpending(&pending) == 0);
  CHECK_EQ(sigismember(&after, SIGXFSZ), rank == 2);
  CHECK(rank == 2 || !sigismember(&pending, SIGXFSZ));
  CHECK_OK(save_value(1, 10)); /* below the limit */
  return 0;
}

static int nothing(cddp_group *g, void *arg) { return (void)g, (void)arg, 0; }

static int no_space_for_the_recorder(int rank, void *arg) {
  (void)rank, (void)arg;
  setenv("CDDP_RECORD", directory, 1);
  limit_files(10000);
  CHECK_IS(cddp_run_threads(nothing, NULL, 2), CDDP_IO);
  CHECK(strstr(cddp_error(), "recorder") != NULL && strstr(cddp_error(), "ulimit -f") != NULL);
  return 0;
}

static void test_size_limit(void) {
  pid_t pid;
  int i, status, files = ranks_entries(directory);
  CHECK_OK(save_value(1, 10));
  for (i = 0; i < 3; i++) {
    pid = ranks_fork(no_space, i, NULL);
    ranks_join(&pid, 1, 30, &status);
    CHECK_EQ(status, 0);
    CHECK(holds(1, 10) && access(temporary, F_OK) != 0);
  }
  files = ranks_entries(directory);
  pid = ranks_fork(no_space_for_the_recorder, 0, NULL);
  ranks_join(&pid, 1, 30, &status);
  CHECK_EQ(status, 0);
  CHECK_EQ(ranks_entries(directory), files);
}

static int no_right(int rank, void *arg) {
  (void)rank, (void)arg;
  CHECK(chmod(directory, 0555) == 0);
  if (geteuid() == 0) CHECK(setgid(65534) == 0 && setuid(65534) == 0);
  CHECK_IS(save_value(3, 10), CDDP_IO);
  CHECK(strstr(cddp_error(), "Permission denied") != NULL);
  return 0;
}

/* The directory may be written, but not read. */
static int no_look(int rank, void *arg) {
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct none[2];
  (void)rank, (void)arg;
  memset(none, 0, sizeof none);
  CHECK(chmod(directory, 0300) == 0);
  CHECK(syscall(SYS_capset, &header, none) == 0); /* root may read it else */
  CHECK_OK(save_value(2, 10));
  return 0;
}

static void test_unreadable_directory(void) {
  pid_t pid;
  int status;
  unlink(path);
  pid = ranks_fork(no_look, 0, NULL);
  ranks_join(&pid, 1, 30, &status);
  CHECK(chmod(directory, 0700) == 0);
  CHECK(status == 0 && holds(2, 10) && access(temporary, F_OK) != 0);
  unlink(path);
}

/* As on a file system that has no locks. */
static int save_without_locks(int unused, void *arg) {
  struct sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_flock, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {4, rules};
  (void)unused;
  (void)arg;
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
  CHECK_OK(save_value(6, 10));
  write_bytes(temporary, "abc", 3); /* a dead process left it */
  CHECK_OK(save_value(7, 10));
  return 0;
}

/* The file itself takes the last descriptor: its folder cannot be opened to sync it. */
static int save_by_the_last(int unused, void *arg) {
  struct rlimit limit;
  int fd, last = -1;
  (void)unused;
  (void)arg;
  limit.rlim_cur = limit.rlim_max = 64;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  while ((fd = fcntl(2, F_DUPFD_CLOEXEC, 3)) >= 0) last = fd;
  close(last);
  CHECK_OK(save_value(2, 10));
  return 0;
}

static void test_last_descriptor(void) {
  pid_t pid;
  int status;
  CHECK_OK(save_value(1, 10));
  pid = ranks_fork(save_by_the_last, 0, NULL);
  ranks_join(&pid, 1, 30, &status);
  CHECK(status == 0 && holds(2, 10) && access(temporary, F_OK) != 0);
}

static void test_no_locks(void) {
  pid_t pid = ranks_fork(save_without_locks, 0, NULL);
  int status;
  ranks_join(&pid, 1, 30, &status);
  CHECK(status == 0 && holds(7, 10) && access(temporary, F_OK) != 0);
}

static int removes; /* by its next write: 1: the temporary file; 2: another file takes its name */

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { /* instead of libc's */
  int how = __atomic_exchange_n(&removes, 0, __ATOMIC_SEQ_CST);
  if (how > 0) CHECK(unlink(temporary) == 0);
  if (how == 2) write_bytes(temporary, "abc", 3);
  return syscall(SYS_pwrite64, fd, data, size, at);
}

static void test_temporary_removed(void) {
  int how;
  unlink(path);
  for (how = 1; how < 3; how++) {
    removes = how;
    CHECK_IS(save_value(2, 10), CDDP_IO);
    CHECK(strstr(cddp_error(), "another process removed") != NULL);
    CHECK((access(temporary, F_OK) == 0) == (how == 2) && access(path, F_OK) != 0);
    CHECK_EQ(removes, 0);
  }
  CHECK(unlink(temporary) == 0);
}

static void test_old_file_stays(void) {
  pid_t pid;
  int status, fd;
  CHECK_OK(save_value(1, 10));
  pid = ranks_fork(no_right, 0, NULL);
  ranks_join(&pid, 1, 30, &status);
  CHECK(chmod(directory, 0700) == 0);
  CHECK(status == 0 && holds(1, 10) && access(temporary, F_OK) != 0);
  CHECK(mkdir(temporary, 0700) == 0);
  CHECK_IS(save_value(4, 10), CDDP_IO);
  CHECK(rmdir(temporary) == 0 && symlink("elsewhere", temporary) == 0);
  CHECK_OK(save_value(1, 10)); /* not written through */
  CHECK(holds(1, 10) && access("elsewhere", F_OK) != 0);
  fd = open(temporary, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0 && write(fd, "abc", 3) == 3);
  CHECK_IS(save_value(4, 10), CDDP_IO);
  CHECK(strstr(cddp_error(), "another process is writing") != NULL);
  CHECK(holds(1, 10) && access(temporary, F_OK) == 0);
  close(fd); /* as one that a dead process left */
  CHECK_OK(save_value(5, 10));
  CHECK(holds(5, 10) && access(temporary, F_OK) != 0);
  unlink(path);
  CHECK(mkdir(path, 0700) == 0);
  CHECK_IS(save_value(6, 10), CDDP_IO);
  CHECK(strstr(cddp_error(), "directory") != NULL && access(temporary, F_OK) != 0);
  CHECK(rmdir(path) == 0);
}

static bool held_text(const char *name, const char *text) {
  unsigned char bytes[64];
  return read_bytes(name, bytes, sizeof bytes) == strlen(text) &&
         memcmp(bytes, text, strlen(text)) == 0;
}

static mode_t mode_of(const char *name) { /* kind and permissions */
  struct stat st;
  return lstat(name, &st) == 0 ? st.st_mode : 0;
}

static bool owned(const char *name, uid_t uid, gid_t gid, mode_t mode) {
  struct stat st;
  if (lstat(name, &st) != 0) return false;
  if (st.st_uid == uid && st.st_gid == gid && (st.st_mode & 07777) == mode) return true;
  fprintf(stderr, "  %s: %u:%u %o\n", name, st.st_uid, st.st_gid, st.st_mode & 07777);
  return false;
}

/* Saves to what is no regular file: it stays what it is, and the text says what that is. */
static void refused(const char *what) {
  mode_t mode = mode_of(path);
  CHECK(mode != 0);
  CHECK_IS(save_value(1, 10), CDDP_IO);
  CHECK(strstr(cddp_error(), what) != NULL && strstr(cddp_error(), path) != NULL);
  CHECK(mode_of(path) == mode && access(temporary, F_OK) != 0);
  CHECK(unlink(path) == 0);
}

static void test_only_regular_files(void) {
  struct sockaddr_un a;
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  unlink(path);
  CHECK(mkfifo(path, 0600) == 0);
  refused("pipe");
  memset(&a, 0, sizeof a);
  a.sun_family = AF_UNIX;
  snprintf(a.sun_path, sizeof a.sun_path, "%.100s", path);
  CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
  close(fd);
  refused("socket");
  CHECK(symlink("elsewhere", path) == 0);
  refused("symbolic link");
  if (mknod(path, S_IFCHR | 0600, 1 << 8 | 3) == 0) refused("device"); /* what /dev/null is */
  else fprintf(stderr, "  no right to make a device: that is left out\n");
}

static void test_mode_is_kept(void) {
  static const mode_t modes[] = {0600, 0640, 0644, 0400};
  mode_t mask = umask(027);
  size_t i;
  unlink(path);
  CHECK_OK(save_value(1, 10));
  CHECK(owned(path, geteuid(), getegid(), 0640)); /* a new file's */
  for (i = 0; i < sizeof modes / sizeof *modes; i++) {
    CHECK(chmod(path, modes[i]) == 0);
    CHECK_OK(save_value(2, 10));
    CHECK(owned(path, geteuid(), getegid(), modes[i]));
  }
  CHECK(chmod(path, 0600) == 0);
  umask(mask);
}

/* fn as another user, in the directory, which all may write to; what it returns. */
static int as_user(int (*fn)(int rank, void *arg), uid_t uid) {
  int status;
  pid_t pid = ranks_fork(fn, (int)uid, NULL);
  ranks_join(&pid, 1, 30, &status);
  return status;
}

static void become(int uid) {
  gid_t also = UID_A; /* a group that both belong to */
  CHECK(chdir(directory) == 0 && setgroups(1, &also) == 0);
  CHECK(setgid((gid_t)uid) == 0 && setuid((uid_t)uid) == 0);
  umask(022);
  strcpy(path, "x.safetensors"); /* the way there is not open to all */
  strcpy(temporary, "x.safetensors.tmp");
}

static int save_as(int uid, void *arg) {
  (void)arg;
  become(uid);
  CHECK_OK(save_value(3, 10));
  return 0;
}

static void test_owner_is_this_process(void) { /* and the mode is the old file's */
  unlink(path);
  if (geteuid() != 0) return (void)fprintf(stderr, "  needs root\n");
  CHECK(chmod(directory, 0777) == 0);
  CHECK(as_user(save_as, UID_A) == 0 && owned(path, UID_A, UID_A, 0644));
  CHECK(chmod(path, 0640) == 0);
  CHECK_OK(save_value(4, 10));
  CHECK(owned(path, 0, getegid(), 0640) && holds(4, 10));
  CHECK(unlink(path) == 0 && chmod(directory, 0700) == 0);
}

/* A file of that user's with path.tmp's name, which it keeps locked until the parent has saved. */
static int hold_temporary(int uid, void *arg) {
  int *stage = (int *)arg, fd;
  become(uid);
  fd = open(temporary, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  CHECK(fd >= 0 && fchmod(fd, 0666) == 0 && flock(fd, LOCK_EX) == 0);
  __atomic_store_n(stage, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(stage, __ATOMIC_SEQ_CST) == 1) ranks_sleep(0.001);
  CHECK(write(fd, "mine", 4) == 4);
  return 0;
}

static int save_beside_it(int uid, void *arg) {
  char want[32];
  (void)arg;
  become(uid);
  snprintf(want, sizeof want, "uid %d", UID_A);
  CHECK_IS(save_value(5, 10), CDDP_IO); /* no right to remove it in a sticky directory */
  CHECK(strstr(cddp_error(), want) != NULL && strstr(cddp_error(), temporary) != NULL);
  return 0;
}

static int make_links(int uid, void *arg) {
  (void)arg;
  become(uid);
  CHECK(symlink("victim", path) == 0 && symlink("victim", temporary) == 0);
  return 0;
}

static int lock_what_is_there(int uid, void *arg) { /* what others may read */
  int *stage = (int *)arg, fd;
  become(uid);
  while (__atomic_load_n(stage, __ATOMIC_SEQ_CST) == 0) {
    fd = open(temporary, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) ranks_sleep(0.002);
    if (fd >= 0) close(fd);
  }
  return 0;
}

static void test_strangers(void) {
  int *stage = (int *)ranks_shared(sizeof *stage), i, status;
  char victim[300];
  pid_t pid;
  unlink(path);
  if (geteuid() != 0) return (void)fprintf(stderr, "  needs root\n");
  snprintf(victim, sizeof victim, "%s/victim", directory);
  write_bytes(victim, "precious", 8);
  CHECK(chmod(directory, 01777) == 0);

  pid = ranks_fork(hold_temporary, UID_A, stage);
  while (__atomic_load_n(stage, __ATOMIC_SEQ_CST) == 0) ranks_sleep(0.001);
  CHECK(as_user(save_beside_it, UID_B) == 0);
  CHECK_OK(save_value(6, 10));
  __atomic_store_n(stage, 2, __ATOMIC_SEQ_CST);
  ranks_join(&pid, 1, 30, &status);
  CHECK(status == 0 && holds(6, 10) && access(temporary, F_OK) != 0);
  CHECK(owned(path, 0, getegid(), mode_of(path) & 0755));

  CHECK(unlink(path) == 0 && as_user(make_links, UID_A) == 0);
  CHECK_IS(save_value(7, 10), CDDP_IO);
  CHECK(strstr(cddp_error(), "symbolic link") != NULL && S_ISLNK(mode_of(path)));
  CHECK(unlink(path) == 0);
  CHECK_OK(save_value(7, 10)); /* path.tmp was that user's link, too */
  CHECK(holds(7, 10) && mode_of(temporary) == 0);

  CHECK(link(victim, temporary) == 0); /* not emptied, whosever it is */
  CHECK_OK(save_value(8, 10));
  CHECK(holds(8, 10) && mode_of(temporary) == 0);
  CHECK(held_text(victim, "precious"));

  __atomic_store_n(stage, 0, __ATOMIC_SEQ_CST);
  pid = ranks_fork(lock_what_is_there, UID_B, stage);
  for (i = 0; i < 100; i++) CHECK_OK(save_value(9, 10));
  __atomic_store_n(stage, 1, __ATOMIC_SEQ_CST);
  ranks_join(&pid, 1, 30, &status);
  CHECK(status == 0 && holds(9, 10));
  CHECK(unlink(victim) == 0 && unlink(path) == 0 && chmod(directory, 0700) == 0);
}

static void test_lost_rank(void) {
  int status[3];
  CHECK_OK(save_value(1, 4));
  ranks_script(die, NULL, 3, RANKS_WITHIN(20), status);
  CHECK(status[0] == 0 && status[1] == 0 && WIFSIGNALED(status[2]));
  CHECK(holds(1, 4) && access(temporary, F_OK) != 0);
}

enum { BIG = 100000 };

static int save_for_ever(int rank, void *arg) {
  (void)rank, (void)arg;
  for (;;)
    if (save_value(1, BIG) != CDDP_OK || save_value(2, BIG) != CDDP_OK) return 1;
}

static void test_killed_half_way(void) {
  pid_t pid;
  int round, status, left = 0;
  CHECK_OK(save_value(1, BIG));
  for (round = 0; round < 12; round++) {
    pid = ranks_fork(save_for_ever, 0, NULL);
    ranks_sleep(0.004 + 0.0017 * round); /* somewhere in its saving: any moment will do */
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    CHECK(holds(1, BIG) || holds(2, BIG));
    left += access(temporary, F_OK) == 0;
  }
  fprintf(stderr, "  %d of %d kills left path.tmp\n", left, round);
  CHECK_OK(save_value(3, BIG));
  CHECK(holds(3, BIG) && access(temporary, F_OK) != 0);
}

/* Two processes save to one path: each call writes its own file, or says that the other does. */
static void test_two_writers(void) {
  int round, status, done = 0;
  float value;
  pid_t pid;
  CHECK_OK(save_value(1, BIG));
  pid = ranks_fork(save_for_ever, 0, NULL);
  for (round = 0; round < 200 && done < 10; round++) {
    cddp_result r = save_value(4, BIG);
    CHECK(r == CDDP_OK ||
          (r == CDDP_IO && strstr(cddp_error(), "another process is writing") != NULL));
    done += r == CDDP_OK;
    value = held(BIG); /* read once: the other goes on writing */
    CHECK(value == 4 || value == 1 || value == 2);
  }
  kill(pid, SIGKILL); /* it ends itself when it finds the file locked */
  CHECK(waitpid(pid, &status, 0) == pid);
}

/* Names that a file system takes, in ASCII and with characters of 2 to 4 bytes: two files whose
   names differ only at the end, each saved twice and read. Nothing else is left there. */
static void test_long_names(void) {
  static const char *const fill[] = {"a", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80"};
  int size, k, i, which, round;
  for (size = 240; size <= 255; size++)
    for (k = 0; k < 4; k++) {
      char name[2][600];
      size_t at, n = strlen(fill[k]);
      for (which = 0; which < 2; which++) {
        char *to = name[which] + snprintf(name[which], sizeof name[which], "%s/", directory);
        for (i = 0; i < size - 1; i++) to[i] = 'b';
        for (at = 0; at + n <= (size_t)size - 1; at += n) memcpy(to + at, fill[k], n);
        to[size - 1] = (char)('x' + which);
        to[size] = 0;
      }
      for (round = 0; round < 2; round++)
        for (which = 0; which < 2; which++) {
          float w[2];
          cddp_param p;
          memset(&p, 0, sizeof p);
          p.name = "w", p.data = w, p.count = 2, p.dtype = CDDP_F32;
          w[0] = w[1] = (float)(10 * round + which);
          CHECK_OK(cddp_save(NULL, name[which], &p, 1, NULL));
          w[0] = w[1] = -1;
          CHECK_OK(cddp_load(NULL, name[which], &p, 1, NULL));
          CHECK(w[0] == (float)(10 * round + which) && w[1] == w[0]);
        }
      CHECK_EQ(ranks_entries(directory), 2 + (access(path, F_OK) == 0));
      CHECK(unlink(name[0]) == 0 && unlink(name[1]) == 0);
    }
}

/* Bytes of the UTF-8 character at c, 0: none. Written from the RFC. */
static int character(const unsigned char *c) {
  int i, n = c[0] < 0x80                    ? 1
             : c[0] >= 0xc2 && c[0] <= 0xdf ? 2
             : (c[0] & 0xf0) == 0xe0        ? 3
             : (c[0] & 0xf8) == 0xf0        ? 4 : 0;
  for (i = 1; i < n; i++)
    if ((c[i] & 0xc0) != 0x80) return 0;
  return n;
}

/* The last error text is UTF-8, and whole: no byte of the program's texts is shown as an escape. */
static void check_text(const char *what) {
  const unsigned char *c = (const unsigned char *)cddp_error();
  int n;
  while (*c != 0 && (n = character(c)) > 0) c += n;
  if (*c != 0 || strstr(cddp_error(), "\\x") != NULL)
    test_fail(__FILE__, __LINE__, "%s: not UTF-8, or cut in a character", what);
  CHECK(cddp_error()[0] != 0);
}

static int cut_texts(cddp_group *g, void *arg) {
  static const char *const fill[] = {"\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80"};
  float w[4] = {0};
  int k, before, length;
  (void)arg;
  for (k = 0; k < 3; k++)
    for (before = 0; before < 4; before++)
      /* longer than a name's part of a text, and than a text */
      for (length = 70; length < 800; length += 331) {
        char name[900] = "", file[1200];
        cddp_ddp *d = NULL;
        cddp_param p[2];
        cddp_store_desc store;
        cddp_store *s;
        memset(p, 0, sizeof p);
        memset(name, 'a', (size_t)before);
        while ((int)strlen(name) < length) strcat(name, fill[k]);
        p[0].name = p[1].name = name;
        p[0].data = p[1].data = w; /* overlap */
        p[0].count = p[1].count = 4;
        CHECK_IS(cddp_ddp_create(&d, g, p, 2, NULL), CDDP_INVALID_ARGUMENT);
        check_text("overlap");
        p[0].dtype = CDDP_I32;
        CHECK_IS(cddp_ddp_create(&d, g, p, 1, NULL), CDDP_INVALID_ARGUMENT);
        check_text("dtype");
        p[0].dtype = CDDP_F32;
        if (cddp_world_size(g) > 1) {
          p[0].count = cddp_rank(g) == 0 ? 4 : 3;
          CHECK_IS(cddp_ddp_create(&d, g, p, 1, NULL), CDDP_MISMATCH);
          check_text("mismatch");
          p[0].count = 4;
          CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
          CHECK_IS(cddp_ddp_wait(d), CDDP_INVALID_ARGUMENT);
          check_text("not ready");
          cddp_ddp_destroy(d);
        } else {
          CHECK_OK(cddp_save(NULL, path, p, 1, NULL));
          p[0].count = 3;
          CHECK_IS(cddp_load(NULL, path, p, 1, NULL), CDDP_INVALID_ARGUMENT);
          check_text("count");
          p[0].count = 4, p[0].dtype = CDDP_I32;
          CHECK_IS(cddp_load(NULL, path, p, 1, NULL), CDDP_INVALID_ARGUMENT);
          check_text("type");
          p[0].name = "other", p[0].dtype = CDDP_F32;
          CHECK_IS(cddp_load(NULL, path, p, 1, NULL), CDDP_INVALID_ARGUMENT);
          check_text("tensor");
          snprintf(file, sizeof file, "%s/none/%s", directory, name);
          CHECK_IS(cddp_save(NULL, file, p, 1, NULL), CDDP_IO);
          check_text("save");
          CHECK_IS(cddp_load(NULL, file, p, 1, NULL), CDDP_IO);
          check_text("load");
          memset(&store, 0, sizeof store);
          store.init_method = name;
          CHECK_IS(cddp_store_create(&s, &store), CDDP_INVALID_ARGUMENT);
          check_text("store");
        }
      }
  return 0;
}

static void test_texts_end_at_a_character(void) {
  float w[1];
  cddp_param p;
  CHECK_OK(ranks_run(cut_texts, NULL, 1, false));
  CHECK_OK(ranks_run(cut_texts, NULL, 2, true));
  memset(&p, 0, sizeof p);
  p.name = "w", p.data = w, p.count = 1, p.dtype = CDDP_F32; /* Latin-1: escaped */
  CHECK_IS(cddp_save(NULL, "/none/caf\xe9", &p, 1, NULL), CDDP_IO);
  CHECK(strstr(cddp_error(), "caf\\xe9") != NULL);
}

/* fsync that takes longer than timeout_s, until another rank has given up: the file is in place,
   and all ranks hear so. */
static int *given_up; /* shared */
static bool slow;     /* the next fsync; the directory's is quick */

int fsync(int fd) {
  double deadline = test_now() + RANKS_WITHIN(20);
  while (slow && __atomic_load_n(given_up, __ATOMIC_SEQ_CST) == 0 && test_now() < deadline)
    ranks_sleep(0.01);
  slow = false;
  return (int)syscall(SYS_fsync, fd);
}

static int save_slowly(int rank, void *arg) {
  float w[2] = {4, 4};
  cddp_group_desc desc;
  cddp_param p;
  cddp_group *g;
  if (arg != NULL) ranks_setenv("CDDP_HOST_ID", rank % *(int *)arg);
  memset(&desc, 0, sizeof desc);
  memset(&p, 0, sizeof p);
  desc.timeout_s = RANKS_SLOW ? 4 : 1;
  p.name = "w", p.data = w, p.count = 2, p.dtype = CDDP_F32;
  CHECK_OK(cddp_init(&g, &desc));
  slow = true;
  CHECK_IS(cddp_save(g, path, &p, 1, NULL), CDDP_TIMEOUT);
  __atomic_store_n(given_up, 1, __ATOMIC_SEQ_CST);
  CHECK(strstr(cddp_error(), rank == 0 ? "the file is complete and in place"
                                       : "rank 0 has not finished writing the file") != NULL);
  CHECK(strstr(cddp_error(), "all_gather") == NULL);
  CHECK(strstr(cddp_error(), "cddp_save at ") != NULL);
  if (test_failures != 0) fprintf(stderr, "rank %d: %s\n", rank, cddp_error());
  cddp_destroy(g);
  return 0;
}

static void test_slow_disk(void) {
  int hosts, status[3];
  given_up = (int *)ranks_shared(sizeof *given_up);
  for (hosts = 1; hosts <= 2; hosts++) {
    *given_up = 0;
    ranks_script(save_slowly, &hosts, 3, RANKS_WITHIN(30), status);
    CHECK(ranks_exited_well(status, 3));
    CHECK(holds(4, 2));
  }
}

int main(void) {
  snprintf(directory, sizeof directory, "%s/cddp-checkpoint.XXXXXX",
           getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
  if (mkdtemp(directory) == NULL) return perror(directory), 1;
  snprintf(path, sizeof path, "%s/x.safetensors", directory);
  snprintf(temporary, sizeof temporary, "%s.tmp", path);
  RUN(test_accepted);
  RUN(test_refused);
  RUN(test_lengths);
  RUN(test_bytes);
  RUN(test_round_trip);
  RUN(test_foreign);
  RUN(test_scalar);
  RUN(test_other_optimizer);
  RUN(test_arguments);
  RUN(test_resume);
  RUN(test_resume_shards);
  RUN(test_step_count);
  RUN(test_go_back);
  RUN(test_no_numbers);
  RUN(test_sampler);
  RUN(test_sampler_even);
  RUN(test_sampler_zeroed);
  RUN(test_all_ranks_hear);
  RUN(test_size_limit);
  RUN(test_unreadable_directory);
  RUN(test_last_descriptor);
  RUN(test_no_locks);
  RUN(test_temporary_removed);
  RUN(test_old_file_stays);
  RUN(test_only_regular_files);
  RUN(test_mode_is_kept);
  RUN(test_owner_is_this_process);
  RUN(test_strangers);
  RUN(test_lost_rank);
  RUN(test_killed_half_way);
  RUN(test_two_writers);
  RUN(test_long_names);
  RUN(test_texts_end_at_a_character);
  RUN(test_slow_disk);
  unlink(path);
  unlink(temporary);
  CHECK(rmdir(directory) == 0); /* nothing else was left there */
  return TEST_END();
}
