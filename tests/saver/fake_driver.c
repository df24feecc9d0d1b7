/* A CUDA driver with the calls that the memory saver makes, over memfd and mmap: libcuda.so.1 of the tests.
 *
 * Physical memory is a memfd, filled with POISON when it is made, so that bytes nobody restored can not pass for zeros
 * or for luck. Misuse is answered as the real driver answers it: unmapping what is not mapped is an invalid value, and
 * more than there is is out of memory. How much there is: FAKE_DEVICE_BYTES, less what fake_take() takes, which stands
 * for other processes.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { GRANULARITY = 2 << 20, POISON = 0xA5, MOST = 4096 };

typedef struct { int fd; size_t size; int references; } physical;
typedef struct { CUdeviceptr address; size_t size; CUmemGenericAllocationHandle handle; } mapping;

static physical memory[MOST]; /* handle - 1; free where references == 0 */
static mapping mapped[MOST];  /* free where size == 0 */
static size_t used, taken;

static size_t total(void) {
  const char *text = getenv("FAKE_DEVICE_BYTES");
  return text ? strtoull(text, NULL, 10) : (size_t)1 << 30;
}

void fake_take(size_t nbytes) { taken = nbytes; }

size_t fake_total(void) { return total(); }

size_t fake_free(void) { return used + taken < total() ? total() - used - taken : 0; }

static mapping *mapping_at(CUdeviceptr address) {
  for (int i = 0; i < MOST; i++)
    if (mapped[i].size && mapped[i].address <= address && address < mapped[i].address + mapped[i].size) return &mapped[i];
  return NULL;
}

static void release(CUmemGenericAllocationHandle handle) {
  physical *it = &memory[handle - 1];
  if (--it->references) return;
  close(it->fd);
  used -= it->size;
}

static int filled(size_t size) {
  int fd = memfd_create("device", 0);
  if (fd < 0) return -1;
  void *bytes = ftruncate(fd, size) ? MAP_FAILED : mmap(NULL, size, PROT_WRITE, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) {
    close(fd);
    return -1;
  }
  memset(bytes, POISON, size);
  munmap(bytes, size);
  return fd;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const void *properties, unsigned long long flags) {
  if (size % GRANULARITY) return INVALID_VALUE;
  if (size > fake_free()) return OUT_OF_MEMORY;
  for (int i = 0; i < MOST; i++) {
    if (memory[i].references) continue;
    int fd = filled(size);
    if (fd < 0) return OUT_OF_MEMORY;
    memory[i] = (physical){fd, size, 1};
    used += size;
    *handle = i + 1;
    return SUCCESS;
  }
  return OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (!handle || handle > MOST || !memory[handle - 1].references) return INVALID_VALUE;
  release(handle);
  return SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  mapping *there = mapping_at((CUdeviceptr)address);
  if (!there) return INVALID_VALUE;
  memory[there->handle - 1].references++;
  *handle = there->handle;
  return SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  void *place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (CUdeviceptr)place;
  return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  if (mapping_at(address)) return INVALID_VALUE;
  return munmap((void *)address, size) ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  if (mapping_at(address) || !handle || handle > MOST || !memory[handle - 1].references) return INVALID_VALUE;
  for (int i = 0; i < MOST; i++) {
    if (mapped[i].size) continue;
    void *place = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory[handle - 1].fd, offset);
    if (place == MAP_FAILED) return INVALID_VALUE;
    mapped[i] = (mapping){address, size, handle};
    memory[handle - 1].references++;
    return SUCCESS;
  }
  return OUT_OF_MEMORY;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const void *access, size_t count) {
  return mapping_at(address) && !mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  mapping *there = mapping_at(address);
  if (!there || there->address != address || there->size != size) return INVALID_VALUE;
  mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  there->size = 0;
  release(there->handle);
  return SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
  *granularity = GRANULARITY;
  return SUCCESS;
}

CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
CUresult cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 0, SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_VALUE ? "invalid argument" : "no error";
  return SUCCESS;
}
