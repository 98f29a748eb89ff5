/* A stub of the CUDA driver library, for tests without a GPU. It runs no kernel. It refuses what a GPU would refuse of
 * Triton's launcher and TMA encoder, and records the last launch. A "binary" is PTX, from which it reads the sizes of a
 * kernel's parameters. */
#include "cuda.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 64 /* parameters of a kernel */
#define CHECK(ok, ...)                                                                                                 \
  do {                                                                                                                 \
    if (!(ok)) {                                                                                                       \
      snprintf(fault, sizeof fault, __VA_ARGS__);                                                                      \
      return CUDA_ERROR_INVALID_VALUE;                                                                                 \
    }                                                                                                                  \
  } while (0)

typedef struct {
  const char *name;
  int shared, count, size[MOST];
} Function;

/* Set by the tests. */
int stub_shared_memory = 232448; /* bytes that a block may use */
int stub_capturing = 0;
/* Read by the tests. */
long stub_modules, stub_descriptors, stub_launches;
int stub_count;              /* of the last launch's parameters; also of the next two arrays' entries */
int stub_size[MOST];         /* bytes */
uint64_t stub_value[MOST];   /* the first 8 bytes */
static char fault[512];

CUresult cuGetErrorString(CUresult error, const char **text) { return *text = fault, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13020, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int i) { return *device = i, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return *n = 1, CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = stub_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  int optin = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
  int total = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
  *value = optin ? stub_shared_memory : total ? stub_shared_memory + 1024 : 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)value = pointer, CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *ptx) {
  stub_modules++;
  CHECK(!stub_capturing, "a kernel is loaded while a graph is captured");
  return *module = (CUmodule)ptx, CUDA_SUCCESS;
}

/* Read the sizes of the parameters: ".param .u64 .ptr .global .align 1 name," or ".param .align 64 .b8 name[128]". */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *f = calloc(1, sizeof *f);
  char entry[256];
  snprintf(entry, sizeof entry, ".entry %s(", name);
  const char *at = strstr((const char *)module, entry), *end = at ? strchr(at, ')') : NULL;
  CHECK(end, "no kernel %s", name);
  for (at = strstr(at, ".param"); at && at < end; at = strstr(at + 1, ".param")) {
    const char *stop = at + strcspn(at, ",)"), *array = memchr(at, '[', stop - at);
    CHECK(f->count < MOST, "%s has too many parameters", name);
    f->size[f->count++] = array ? atoi(array + 1) : atoi(at + strlen(".param .u")) / 8;
  }
  f->name = strdup(name), f->shared = 48 * 1024;
  return *function = (CUfunction)f, CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}

/* From 3.8 on, Triton first asks for the oversized shared memory of sm_107, an attribute that other GPUs refuse. */
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  CHECK(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, "attribute %d of a function", attribute);
  CHECK(value <= stub_shared_memory, "%d bytes of shared memory", value);
  ((Function *)function)->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* of a CUtensorMapDataType */
  static const unsigned swizzled[] = {1u << 30, 32, 64, 128};        /* of a CUtensorMapSwizzle */
  stub_descriptors++;
  CHECK(type < sizeof bytes / sizeof *bytes && rank >= 1 && rank <= 5, "descriptor of type %d, %u dimensions", type,
        rank);
  CHECK((uintptr_t)base % 16 == 0, "descriptor of a tensor at %p", base);
  CHECK(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle < 4, "descriptor with swizzle %d", swizzle);
  for (unsigned i = 0; i < rank; i++) {
    CHECK(size[i] >= 1 && size[i] <= 1ull << 32, "descriptor of size %llu", (unsigned long long)size[i]);
    CHECK(box[i] >= 1 && box[i] <= 256, "descriptor with a box of %u elements", box[i]);
  }
  for (unsigned i = 0; i + 1 < rank; i++) {
    CHECK(stride[i] % 16 == 0 && stride[i] < 1ull << 40, "descriptor with a stride of %llu bytes",
          (unsigned long long)stride[i]);
    CHECK(stride[i] >= size[i] * (i ? stride[i - 1] : bytes[type]), "descriptor with rows that overlap");
  }
  unsigned inner = box[0] * bytes[type];
  CHECK(inner % 16 == 0 && inner <= swizzled[swizzle], "descriptor with rows of %u bytes in swizzle %d", inner,
        swizzle);
  memset(map, 0, sizeof *map);
  map->opaque[0] = (uintptr_t)base;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *launch, CUfunction function, void **parameters, void **extra) {
  const Function *f = (const Function *)function;
  unsigned threads = launch->blockDimX * launch->blockDimY * launch->blockDimZ;
  stub_launches++;
  unsigned x = launch->gridDimX, y = launch->gridDimY, z = launch->gridDimZ;
  CHECK(x >= 1 && x <= INT32_MAX && y >= 1 && y <= 65535 && z >= 1 && z <= 65535, "%s: a grid of %u x %u x %u", f->name,
        x, y, z);
  CHECK(threads >= 32 && threads <= 1024, "%s: a block of %u threads", f->name, threads);
  CHECK(launch->sharedMemBytes <= (unsigned)f->shared, "%s: %u bytes of shared memory", f->name,
        launch->sharedMemBytes);
  stub_count = f->count;
  for (int i = 0; i < f->count; i++) {
    stub_size[i] = f->size[i];
    stub_value[i] = 0;
    memcpy(&stub_value[i], parameters[i], f->size[i] < 8 ? f->size[i] : 8);
  }
  return CUDA_SUCCESS;
}
