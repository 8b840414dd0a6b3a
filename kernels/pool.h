/* The kernels' own threads. See pool.c. */
#pragma once

#include <stdint.h>

typedef struct Pool Pool;

/* Chunk number `chunk` of a job; chunks may run in any order, each on any thread. */
typedef void (*Job)(const void *job, int64_t chunk);

/* All chunks 0 .. chunks - 1 are done when this returns. */
void pool_run(Pool *pool, Job run, const void *job, int64_t chunks);

/* The calling thread included. */
int64_t pool_threads(const Pool *pool);
