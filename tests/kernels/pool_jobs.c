/* Jobs for test_pool.py, linked with pool.c alone. */
#include "pool.h"

typedef struct {
    Pool *pool;
    int64_t chunks, work;
    int64_t *counts; /* [chunks], one more each time the chunk runs */
} Counting;

static void count(const void *job, int64_t chunk) {
    const Counting *j = job;
    for (volatile int64_t i = 0; i < j->work; i++) {}
    __atomic_fetch_add(&j->counts[chunk], 1, __ATOMIC_RELAXED);
}

/* How many chunks of `jobs` jobs were not run exactly once when pool_run came back. */
int64_t count_wrong(Pool *pool, int64_t jobs, int64_t most, int64_t work, int64_t *counts) {
    int64_t wrong = 0;
    for (int64_t n = 0; n < jobs; n++) {
        int64_t chunks = n % (most + 1);
        Counting job = {pool, chunks, work, counts};
        for (int64_t i = 0; i < most; i++) counts[i] = 0;
        pool_run(pool, count, &job, chunks);
        for (int64_t i = 0; i < most; i++) wrong += counts[i] != (i < chunks);
    }
    return wrong;
}

static void nest(const void *job, int64_t chunk) {
    const Counting *j = job;
    Counting inner = *j;
    inner.counts += chunk * j->chunks;
    pool_run(j->pool, count, &inner, j->chunks);
}

/* counts: [chunks * chunks]. */
void count_nested(Pool *pool, int64_t chunks, int64_t *counts) {
    Counting job = {pool, chunks, 100, counts};
    pool_run(pool, nest, &job, chunks);
}
