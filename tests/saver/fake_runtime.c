/* A CUDA runtime with the calls that the memory saver makes: libcudart.so.13 of the tests, over fake_driver.c. */
#include <stdlib.h>
#include <string.h>

size_t fake_total(void);
size_t fake_free(void);

int cudaDeviceSynchronize(void) { return 0; }
int cudaGetDevice(int *device) { return *device = 0, 0; }
int cudaSetDevice(int device) { return 0; }
const char *cudaGetErrorString(int error) { return error ? "error" : "no error"; }
int cudaMallocHost(void **address, size_t size) { return (*address = malloc(size)) ? 0 : 2; }
int cudaFreeHost(void *address) { return free(address), 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return memcpy(to, from, size), 0; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  return *free_bytes = fake_free(), *total_bytes = fake_total(), 0;
}
/* What the saver's own cudaMalloc and cudaFree forward to, outside regions. */
int cudaMalloc(void **address, size_t size) { return cudaMallocHost(address, size); }
int cudaFree(void *address) { return cudaFreeHost(address); }
