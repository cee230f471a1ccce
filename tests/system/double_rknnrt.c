/* A double of the NPU's C runtime for tests: it runs no artifact and knows nothing of the vendor's.
 *
 * It reads a script where a runtime reads an artifact, does what the script says, and computes outputs by a rule or by
 * a callback of the test. Declarations are our own, from sizes and offsets, written apart from kvgate/board/capi.py.
 * Memory is read and written here by explicit loops over every index, apart from kvgate/board/boundary.py.
 *
 * Script, one command a line (CALL without `rknn_`; N: the how manieth such call of the process, 0: every one):
 *   kvgate-double                                          the first line
 *   input|output NAME TYPE FMT QNT FL ZP SCALE W_STRIDE H_STRIDE DIM,DIM,..     dims in the order of FMT
 *   custom TEXT | api TEXT | driver TEXT | platform NAME | memory WEIGHTS INTERNAL | run_us N | detail TEXT
 *   code CALL N CODE | say CALL N TEXT (stderr) | wait CALL N MS | eat CALL N MIB | exit CALL N CODE
 *   hang CALL N | crash CALL N
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION "2.5.0"
#endif
/* Found by whoever reads the version without loading the library. */
__attribute__((used)) static const char banner[] = "librknnrt version: " VERSION " (kvgate double, no vendor code)";

enum { FLOAT32, FLOAT16, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, BOOL, TYPES };
enum { NCHW, NHWC, NC1HWC2, UNDEFINED };
enum { NONE, DFP, AFFINE };
enum { FAIL = -1, PARAM = -5, MODEL = -6, CTX = -7, INPUT = -8, OUTPUT = -9 };
enum { COLLECT_PERF = 0x8, SHARE_WEIGHTS = 0x20, INFO_ONLY = 0x100 };
static const int item[TYPES] = {4, 2, 1, 1, 2, 2, 4, 4, 8, 1};

typedef struct {
  uint32_t index, n_dims, dims[16];
  char name[256];
  uint32_t n_elems, size;
  int32_t fmt, type, qnt;
  int8_t fl;
  int32_t zp;
  float scale;
  uint32_t w_stride, size_with_stride;
  uint8_t pass_through;
  uint32_t h_stride;
} Attr;
typedef struct { void *address; uint64_t physical; int32_t fd, offset; uint32_t size, flags; void *private_data; } Mem;
typedef struct { uint32_t index; void *buf; uint32_t size; uint8_t pass_through; int32_t type, fmt; } Input;
typedef struct { uint8_t want_float, is_prealloc; uint32_t index; void *buf; uint32_t size; } Output;
typedef struct {
  uint64_t ctx;
  int32_t offset;
  uint32_t size;
  int32_t fd;
  uint32_t flags;
  void *key;
  uint8_t rest[112];
} Extend;
_Static_assert(sizeof(Attr) == 376 && sizeof(Mem) == 40 && sizeof(Input) == 32 && sizeof(Output) == 24, "sizes");
_Static_assert(sizeof(Extend) == 144, "sizes");

enum { MOST = 600, STEPS = 64 };
/* values: real numbers in the graph's order */
typedef struct { Attr attr; Mem *mem; float *values; int is_set; } Tensor;
typedef struct { char verb[16], call[24], text[1024]; long n, number; } Act;
typedef struct { int users; } Weights;
typedef struct {
  Tensor inputs[MOST], outputs[MOST];
  uint32_t n_inputs, n_outputs, flags, weights_size, internal_size;
  char custom[1024], api[256], driver[256], platform[32], *detail;
  int64_t run_us;
  int32_t mask;
  Weights *weights;
} Context;
typedef void (*Compute)(const float *const *inputs, float *const *outputs);

static Act acts[STEPS];
static int n_acts;
static Compute compute;
static int live_contexts, live_memories;
static struct { const char *name; long count; } counts[32];
static FILE *journal;

/* For the tests */
void double_compute(Compute function) { compute = function; }
int double_live(void) { return live_contexts + live_memories; }
int double_weight_users(uint64_t ctx) { return ((Context *)ctx)->weights->users; }
int double_mask(uint64_t ctx) { return ((Context *)ctx)->mask; }
long double_calls(const char *name) {
  for (int i = 0; i < 32 && counts[i].name; i++)
    if (!strcmp(counts[i].name, name)) return counts[i].count;
  return 0;
}
void double_forget(void) { memset(counts, 0, sizeof counts); }

/* The script's acts for the call; the code it then returns, 0: go on. */
static int enter(const char *name) {
  int i = 0;
  while (counts[i].name && strcmp(counts[i].name, name)) i++;
  counts[i].name = name;
  long n = ++counts[i].count;
  const char *path = getenv("KVGATE_DOUBLE_JOURNAL");
  if (path && !journal) journal = fopen(path, "a");
  if (journal) fprintf(journal, "%s\n", name), fflush(journal);
  int code = 0;
  for (Act *a = acts; a < acts + n_acts; a++) {
    if (strcmp(a->call, name) || (a->n && a->n != n)) continue;
    struct timespec time = {a->number / 1000, a->number % 1000 * 1000000};
    if (!strcmp(a->verb, "code")) code = (int)a->number;
    if (!strcmp(a->verb, "say")) fprintf(stderr, "%s\n", a->text), fflush(stderr);
    if (!strcmp(a->verb, "wait")) nanosleep(&time, NULL);
    if (!strcmp(a->verb, "hang")) for (;;) pause();
    if (!strcmp(a->verb, "crash")) raise(SIGSEGV);
    if (!strcmp(a->verb, "exit")) _exit((int)a->number);
    if (!strcmp(a->verb, "eat")) { /* touched, so that it is really taken */
      char *food = malloc((size_t)a->number << 20);
      if (food) memset(food, 1, (size_t)a->number << 20);
    }
  }
  return code;
}

static void parse_tensor(Tensor *t, uint32_t index, const char *line) {
  Attr *a = &t->attr;
  char dims[256], *at = dims;
  int fl;
  memset(a, 0, sizeof *a);
  sscanf(line, "%255s %d %d %d %d %d %f %u %u %255s", a->name, &a->type, &a->fmt, &a->qnt, &fl, &a->zp, &a->scale,
         &a->w_stride, &a->h_stride, dims);
  a->fl = (int8_t)fl;
  a->index = index;
  a->n_elems = 1;
  for (char *word; (word = strtok_r(at, ",", &at));) a->n_elems *= a->dims[a->n_dims++] = (uint32_t)atoi(word);
  a->size = a->size_with_stride = a->n_elems * (uint32_t)item[a->type];
  if (a->n_dims == 4 && a->fmt != UNDEFINED) {
    uint32_t *d = a->dims, h = a->fmt == NHWC ? d[1] : d[2], w = a->fmt == NHWC ? d[2] : d[3];
    a->size_with_stride = a->size / h / w * (a->h_stride ? a->h_stride : h) * (a->w_stride ? a->w_stride : w);
  }
  t->values = calloc(a->n_elems, sizeof(float));
}

static int parse(Context *c, char *text) {
  char *line = strtok_r(text, "\n", &text);
  if (!line || strcmp(line, "kvgate-double")) return MODEL;
  n_acts = 0;
  strcpy(c->api, VERSION " (kvgate double)");
  strcpy(c->driver, "0.9.8");
  c->run_us = 1000;
  c->detail = calloc(1, 1);
  while ((line = strtok_r(text, "\n", &text)) && strncmp(line, "end", 3)) {
    char verb[16] = "", call[24] = "", rest[1024] = "";
    long n = 0;
    int skip = 0;
    sscanf(line, "%15s %n", verb, &skip);
    const char *value = line + skip;
    if (!strcmp(verb, "input")) parse_tensor(&c->inputs[c->n_inputs], c->n_inputs, value), c->n_inputs++;
    else if (!strcmp(verb, "output")) parse_tensor(&c->outputs[c->n_outputs], c->n_outputs, value), c->n_outputs++;
    else if (!strcmp(verb, "custom")) snprintf(c->custom, sizeof c->custom, "%s", value);
    else if (!strcmp(verb, "api")) snprintf(c->api, sizeof c->api, "%s", value);
    else if (!strcmp(verb, "driver")) snprintf(c->driver, sizeof c->driver, "%s", value);
    else if (!strcmp(verb, "platform")) snprintf(c->platform, sizeof c->platform, "%s", value);
    else if (!strcmp(verb, "memory")) sscanf(value, "%u %u", &c->weights_size, &c->internal_size);
    else if (!strcmp(verb, "run_us")) c->run_us = atol(value);
    else if (!strcmp(verb, "detail")) {
      c->detail = realloc(c->detail, strlen(c->detail) + strlen(value) + 2);
      strcat(strcat(c->detail, value), "\n");
    } else if (sscanf(value, "%23s %ld %1023[^\n]", call, &n, rest) >= 2 && n_acts < STEPS) {
      Act *a = &acts[n_acts++];
      memcpy(a->verb, verb, sizeof verb);
      memcpy(a->call, call, sizeof call);
      memcpy(a->text, rest, sizeof rest);
      a->n = n;
      a->number = atol(rest);
    } else return MODEL;
  }
  return 0;
}

/* Where element (a, b, c, d) of the graph's order lies in memory of that layout, in elements. */
static size_t place(const Attr *t, int fmt, const uint32_t at[4], const uint32_t shape[4], int packed) {
  uint32_t w = !packed && t->w_stride ? t->w_stride : shape[3], h = !packed && t->h_stride ? t->h_stride : shape[2];
  if (fmt == NHWC) return (((size_t)at[0] * h + at[2]) * w + at[3]) * shape[1] + at[1];
  return (((size_t)at[0] * shape[1] + at[1]) * h + at[2]) * w + at[3];
}

static double get(const void *memory, size_t i, int type) {
  switch (type) {
    case FLOAT32: return ((const float *)memory)[i];
    case FLOAT16: return (double)((const _Float16 *)memory)[i];
    case INT8: return ((const int8_t *)memory)[i];
    case UINT8: return ((const uint8_t *)memory)[i];
    case INT16: return ((const int16_t *)memory)[i];
    case UINT16: return ((const uint16_t *)memory)[i];
    case INT32: return ((const int32_t *)memory)[i];
    case UINT32: return ((const uint32_t *)memory)[i];
    case INT64: return (double)((const int64_t *)memory)[i];
    default: return ((const uint8_t *)memory)[i] != 0;
  }
}

static void put(void *memory, size_t i, int type, double value) {
  double whole = value < 0 ? (double)(int64_t)(value - 0.5) : (double)(int64_t)(value + 0.5);
  switch (type) {
    case FLOAT32: ((float *)memory)[i] = (float)value; break;
    case FLOAT16: ((_Float16 *)memory)[i] = (_Float16)value; break;
    case INT8: ((int8_t *)memory)[i] = (int8_t)(whole < -128 ? -128 : whole > 127 ? 127 : whole); break;
    case INT16: ((int16_t *)memory)[i] = (int16_t)(whole < -32768 ? -32768 : whole > 32767 ? 32767 : whole); break;
    case INT32: ((int32_t *)memory)[i] = (int32_t)whole; break;
    case INT64: ((int64_t *)memory)[i] = (int64_t)whole; break;
    default: ((uint8_t *)memory)[i] = (uint8_t)whole;
  }
}

static double scale_of(const Attr *t) { return t->qnt == DFP ? 1.0 / (1 << t->fl) : t->qnt == AFFINE ? t->scale : 1; }
static int zero_of(const Attr *t) { return t->qnt == AFFINE ? t->zp : 0; }

/* Between memory of a type and layout and the tensor's values. real: the memory holds real numbers, not stored ones. */
static void move(Tensor *t, void *memory, int type, int fmt, int packed, int real, int store) {
  const Attr *a = &t->attr;
  uint32_t shape[4] = {1, 1, 1, a->n_elems}, at[4];
  int stored = !real && type != FLOAT32 && type != FLOAT16 && a->qnt != NONE;
  if (a->n_dims == 4) {
    const uint32_t *d = a->dims, nhwc[4] = {d[0], d[3], d[1], d[2]};
    memcpy(shape, a->fmt == NHWC ? nhwc : d, sizeof shape);
  } else fmt = NCHW, packed = 1;
  size_t i = 0;
  for (at[0] = 0; at[0] < shape[0]; at[0]++)
    for (at[1] = 0; at[1] < shape[1]; at[1]++)
      for (at[2] = 0; at[2] < shape[2]; at[2]++)
        for (at[3] = 0; at[3] < shape[3]; at[3]++, i++) {
          size_t p = place(a, fmt, at, shape, packed);
          double scale = stored ? scale_of(a) : 1, zero = stored ? zero_of(a) : 0;
          if (store) put(memory, p, type, t->values[i] / scale + zero);
          else t->values[i] = (float)((get(memory, p, type) - zero) * scale);
        }
}

/* Values as the tensor's type holds them. */
static void settle(Tensor *t) {
  double cell, scale = t->attr.type == FLOAT32 || t->attr.type == FLOAT16 ? 1 : scale_of(&t->attr);
  double zero = t->attr.type == FLOAT32 || t->attr.type == FLOAT16 ? 0 : zero_of(&t->attr);
  for (uint32_t i = 0; i < t->attr.n_elems; i++) {
    put(&cell, 0, t->attr.type, t->values[i] / scale + zero);
    t->values[i] = (float)((get(&cell, 0, t->attr.type) - zero) * scale);
  }
}

static Tensor *find(Context *c, const char *name) {
  for (uint32_t i = 0; i < c->n_inputs; i++) if (!strcmp(c->inputs[i].attr.name, name)) return &c->inputs[i];
  for (uint32_t i = 0; i < c->n_outputs; i++) if (!strcmp(c->outputs[i].attr.name, name)) return &c->outputs[i];
  return NULL;
}

/* Every input value counts in every output value, with a weight that no two of its indexes share by chance. */
static void rule(Context *c) {
  for (uint32_t o = 0; o < c->n_outputs; o++)
    for (uint32_t n = 0; n < c->outputs[o].attr.n_elems; n++) {
      double sum = 0;
      for (uint32_t i = 0; i < c->n_inputs; i++)
        for (uint32_t k = 0; k < c->inputs[i].attr.n_elems; k++) {
          double value = c->inputs[i].values[k];
          int weight = (int)((i * 7 + k * 3 + o * 5 + n) % 11) - 5;
          sum += (value < -1 ? -1 : value > 1 ? 1 : value) * weight / 64;
        }
      c->outputs[o].values[n] = (float)sum;
    }
}

static Context *load(const void *model, uint32_t size) {
  Context *c = calloc(1, sizeof *c);
  char *text;
  if (size) text = memcpy(calloc(size + 1, 1), model, size);
  else {
    FILE *file = fopen(model, "rb");
    if (!file) return free(c), NULL;
    text = calloc(1 << 20, 1);
    if (!fread(text, 1, (1 << 20) - 1, file)) text[0] = 0;
    fclose(file);
  }
  int code = parse(c, text);
  free(text);
  if (code) return free(c), NULL;
  c->weights = calloc(1, sizeof *c->weights);
  c->weights->users = 1;
  live_contexts++;
  return c;
}

int rknn_init(uint64_t *ctx, void *model, uint32_t size, uint32_t flags, Extend *extend) {
  Context *c = load(model, size);
  int code = enter(flags & INFO_ONLY ? "info" : "init");
  if (code && c) free(c), live_contexts--;
  if (code) return code;
  if (!c) return MODEL;
  c->flags = flags;
  if (flags & SHARE_WEIGHTS) {
    Context *other = extend ? (Context *)extend->ctx : NULL;
    if (!other || strcmp(other->custom, c->custom)) return PARAM;
    c->weights = other->weights;
    c->weights->users++;
  }
  *ctx = (uint64_t)c;
  return 0;
}

int rknn_dup_context(uint64_t *from, uint64_t *to) {
  int code = enter("dup_context");
  if (code) return code;
  Context *c = calloc(1, sizeof *c);
  *c = *(Context *)*from;
  c->weights->users++;
  for (uint32_t i = 0; i < c->n_inputs; i++) c->inputs[i].mem = NULL, c->inputs[i].is_set = 0,
    c->inputs[i].values = calloc(c->inputs[i].attr.n_elems, sizeof(float));
  for (uint32_t i = 0; i < c->n_outputs; i++) c->outputs[i].mem = NULL,
    c->outputs[i].values = calloc(c->outputs[i].attr.n_elems, sizeof(float));
  live_contexts++;
  *to = (uint64_t)c;
  return 0;
}

int rknn_destroy(uint64_t ctx) {
  int code = enter("destroy");
  if (code) return code;
  Context *c = (Context *)ctx;
  for (uint32_t i = 0; i < c->n_inputs; i++) free(c->inputs[i].values);
  for (uint32_t i = 0; i < c->n_outputs; i++) free(c->outputs[i].values);
  if (!--c->weights->users) free(c->weights);
  live_contexts--;
  free(c);
  return 0;
}

int rknn_query(uint64_t ctx, int what, void *info, uint32_t size) {
  int code = enter("query");
  if (code) return code;
  Context *c = (Context *)ctx;
  uint32_t *words = info, index = words[0];
  memset(info, 0, size);
  if (what == 0 && size == 8) words[0] = c->n_inputs, words[1] = c->n_outputs;
  else if ((what == 1 || what == 14) && size <= sizeof(Attr) && index < c->n_inputs)
    memcpy(info, &c->inputs[index].attr, size);
  else if ((what == 2 || what == 15) && size <= sizeof(Attr) && index < c->n_outputs)
    memcpy(info, &c->outputs[index].attr, size);
  else if (what == 3 && size == 16) {
    if (!(c->flags & COLLECT_PERF)) return FAIL;
    *(char **)info = c->detail;
    ((uint64_t *)info)[1] = strlen(c->detail);
  } else if (what == 4 && size == 8) *(int64_t *)info = c->run_us;
  else if (what == 5 && size == 512) strcpy(info, c->api), strcpy((char *)info + 256, c->driver);
  else if (what == 6 && size == 64) words[0] = c->weights_size, words[1] = c->internal_size;
  else if (what == 7 && size == 1024) strcpy(info, c->custom);
  else return PARAM;
  return 0;
}

int rknn_set_core_mask(uint64_t ctx, int mask) {
  int code = enter("set_core_mask");
  if (code) return code;
  if (mask != 0 && mask != 1 && mask != 2 && mask != 3 && mask != 4 && mask != 7 && mask != 0xffff) return PARAM;
  ((Context *)ctx)->mask = mask;
  return 0;
}

Mem *rknn_create_mem(uint64_t ctx, uint32_t size) {
  (void)ctx;
  if (enter("create_mem")) return NULL;
  Mem *mem = calloc(1, sizeof *mem);
  mem->address = aligned_alloc(64, (size + 63) / 64 * 64);
  memset(mem->address, 0x5a, size); /* what is not written is seen */
  mem->size = size;
  live_memories++;
  return mem;
}

int rknn_destroy_mem(uint64_t ctx, Mem *mem) {
  (void)ctx;
  int code = enter("destroy_mem");
  if (code) return code;
  free(mem->address);
  free(mem);
  live_memories--;
  return 0;
}

int rknn_set_io_mem(uint64_t ctx, Mem *mem, Attr *attr) {
  int code = enter("set_io_mem");
  if (code) return code;
  Tensor *t = find((Context *)ctx, attr->name);
  if (!t || attr->fmt != t->attr.fmt || attr->type != t->attr.type) return PARAM;
  if (mem->size < t->attr.size_with_stride) return PARAM;
  t->mem = mem;
  return 0;
}

int rknn_inputs_set(uint64_t ctx, uint32_t n, Input *inputs) {
  int code = enter("inputs_set");
  if (code) return code;
  Context *c = (Context *)ctx;
  for (uint32_t i = 0; i < n; i++) {
    if (inputs[i].index >= c->n_inputs || inputs[i].type < 0 || inputs[i].type >= TYPES) return INPUT;
    Tensor *t = &c->inputs[inputs[i].index];
    if (inputs[i].size < t->attr.n_elems * (uint32_t)item[inputs[i].type]) return INPUT;
    move(t, inputs[i].buf, inputs[i].type, inputs[i].fmt, 1, 1, 0);
    t->is_set = 1;
  }
  return 0;
}

int rknn_run(uint64_t ctx, void *extend) {
  (void)extend;
  int code = enter("run");
  if (code) return code; /* the outputs stay those of the step before */
  Context *c = (Context *)ctx;
  const float *inputs[MOST];
  float *outputs[MOST];
  for (uint32_t i = 0; i < c->n_inputs; i++) {
    Tensor *t = &c->inputs[i];
    if (t->mem) move(t, t->mem->address, t->attr.type, t->attr.fmt, 0, 0, 0);
    else if (!t->is_set) return INPUT;
    else settle(t);
    inputs[i] = t->values;
  }
  for (uint32_t i = 0; i < c->n_outputs; i++) outputs[i] = c->outputs[i].values;
  if (compute) compute(inputs, outputs);
  else rule(c);
  for (uint32_t i = 0; i < c->n_outputs; i++) {
    Tensor *t = &c->outputs[i];
    settle(t);
    if (t->mem) move(t, t->mem->address, t->attr.type, t->attr.fmt, 0, 0, 1);
  }
  return 0;
}

int rknn_wait(uint64_t ctx, void *extend) { (void)ctx, (void)extend; return enter("wait"); }

int rknn_outputs_get(uint64_t ctx, uint32_t n, Output *outputs, void *extend) {
  (void)extend;
  int code = enter("outputs_get");
  if (code) return code;
  Context *c = (Context *)ctx;
  for (uint32_t i = 0; i < n; i++) {
    if (i >= c->n_outputs) return OUTPUT;
    Tensor *t = &c->outputs[i];
    int type = outputs[i].want_float ? FLOAT32 : t->attr.type;
    outputs[i].index = i;
    if (!outputs[i].is_prealloc) {
      outputs[i].size = t->attr.n_elems * (uint32_t)item[type];
      outputs[i].buf = malloc(outputs[i].size);
    }
    move(t, outputs[i].buf, type, t->attr.fmt, 1, 0, 1);
  }
  return 0;
}

int rknn_outputs_release(uint64_t ctx, uint32_t n, Output *outputs) {
  (void)ctx;
  int code = enter("outputs_release");
  for (uint32_t i = 0; i < n; i++)
    if (!outputs[i].is_prealloc) free(outputs[i].buf), outputs[i].buf = NULL;
  return code;
}

int rknn_set_batch_core_num(uint64_t ctx, int n) { (void)ctx, (void)n; return enter("set_batch_core_num"); }

/* Asked for by name when the lite package starts; no test calls them. */
int rknn_set_input_shapes(uint64_t ctx, uint32_t n, Attr *attrs) {
  (void)ctx, (void)n, (void)attrs;
  return enter("set_input_shapes");
}
int rknn_mem_sync(uint64_t ctx, Mem *mem, int mode) {
  (void)ctx, (void)mem, (void)mode;
  return enter("mem_sync");
}
