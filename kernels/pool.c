/* Threads that help the calling one with a job, and that it never has to wait for while work is left.
 *
 * A job is cut into chunks, and these lie in lanes, one a thread: neighbouring chunks are one stream from
 * memory. Each thread empties its own lane and then helps with the others'. A thread that sleeps or has
 * lost its core holds up nothing but a chunk that it has already taken.
 *
 * The protocol. `left` of a lane counts down; whoever takes a positive number from it owns a chunk of the
 * job that is there at that moment, and the caller stays until all chunks are done: so `run`, `job` and
 * `chunks` stand still while anyone owns a chunk, and are read only then. A number that is not positive
 * means nothing, and is written over by the next job.
 *
 * An idle worker looks for work for a while, giving way to whoever else wants its core, then sleeps.
 * A call from inside a job, or while another thread's job runs, is done by its caller alone. So is every
 * job after pool_stop, and after a fork in the child, which has no workers. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 128, SPINS = 2000, STACK_BYTES = 8 << 20 };
static const int64_t AWAKE_NANOSECONDS = 2000000;

typedef struct {
    _Alignas(LINE) int64_t left; /* chunks that nobody has taken yet */
    _Alignas(LINE) Pool *pool;   /* from here on for the lane's worker; lane 0 is the caller's */
    pthread_t thread;
    sem_t wake;
    int32_t asleep; /* whoever turns this to 0 posts `wake` */
} Lane;

struct Pool {
    _Alignas(LINE) Job run;
    const void *job;
    int64_t chunks;
    _Alignas(LINE) int64_t done;
    _Alignas(LINE) int32_t busy;
    int32_t stopping;
    int64_t threads; /* lanes in use */
    pid_t owner;     /* the process that has the workers */
    Lane lanes[];
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Own lane first, then the others. */
static void work(Pool *pool, int64_t me) {
    int64_t threads = pool->threads;
    for (int64_t i = 0; i < threads; i++) {
        int64_t owner = (me + i) % threads;
        int64_t *left = &pool->lanes[owner].left;
        while (__atomic_load_n(left, __ATOMIC_RELAXED) > 0) {
            int64_t rest = __atomic_fetch_sub(left, 1, __ATOMIC_ACQ_REL);
            if (rest <= 0) break;
            pool->run(pool->job, pool->chunks * (owner + 1) / threads - rest);
            __atomic_fetch_add(&pool->done, 1, __ATOMIC_RELEASE);
        }
    }
}

static int is_work_left(const Pool *pool, int64_t me) {
    for (int64_t i = 0; i < pool->threads; i++)
        if (__atomic_load_n(&pool->lanes[(me + i) % pool->threads].left, __ATOMIC_SEQ_CST) > 0) return 1;
    return __atomic_load_n(&pool->stopping, __ATOMIC_SEQ_CST);
}

static void sleep_until_called(Lane *lane, int64_t me) {
    __atomic_store_n(&lane->asleep, 1, __ATOMIC_SEQ_CST);
    /* A job that came just before that: stay, unless its caller has already seen us asleep. */
    if (is_work_left(lane->pool, me) && __atomic_exchange_n(&lane->asleep, 0, __ATOMIC_SEQ_CST)) return;
    while (sem_wait(&lane->wake)) {}
}

static void wait_for_work(Lane *lane, int64_t me) {
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&lane->left, __ATOMIC_RELAXED) > 0) return;
        relax();
    }
    int64_t end = now() + AWAKE_NANOSECONDS;
    while (!is_work_left(lane->pool, me)) {
        if (now() > end) {
            sleep_until_called(lane, me);
            return;
        }
        sched_yield();
    }
}

static void *serve(void *argument) {
    Lane *lane = argument;
    Pool *pool = lane->pool;
    int64_t me = lane - pool->lanes;
    while (!__atomic_load_n(&pool->stopping, __ATOMIC_ACQUIRE)) {
        wait_for_work(lane, me);
        work(pool, me);
    }
    return 0;
}

static void wake(Lane *lane) {
    if (__atomic_load_n(&lane->asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(&lane->asleep, 0, __ATOMIC_SEQ_CST))
        sem_post(&lane->wake);
}

void pool_run(Pool *pool, Job run, const void *job, int64_t chunks) {
    if (chunks <= 1 || pool->threads == 1 || __atomic_exchange_n(&pool->busy, 1, __ATOMIC_ACQUIRE)) {
        for (int64_t i = 0; i < chunks; i++) run(job, i);
        return;
    }
    int64_t threads = pool->threads;
    pool->run = run;
    pool->job = job;
    pool->chunks = chunks;
    __atomic_store_n(&pool->done, 0, __ATOMIC_RELAXED);
    for (int64_t i = threads - 1; i >= 0; i--) {
        int64_t count = chunks * (i + 1) / threads - chunks * i / threads;
        __atomic_store_n(&pool->lanes[i].left, count, __ATOMIC_RELEASE);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the chunks first, then who sleeps */
    for (int64_t i = 1; i < threads; i++) wake(&pool->lanes[i]);
    work(pool, 0);
    for (int i = 0; __atomic_load_n(&pool->done, __ATOMIC_ACQUIRE) < chunks; i++)
        if (i < SPINS)
            relax();
        else
            sched_yield(); /* whoever has the last chunk may be waiting for this core */
    __atomic_store_n(&pool->busy, 0, __ATOMIC_RELEASE);
}

int64_t pool_threads(const Pool *pool) { return pool->threads; }

/* `threads` counts the caller. There may be fewer if the system refuses; null if there is no memory. */
Pool *pool_create(int64_t threads) {
    size_t bytes = sizeof(Pool) + (size_t)threads * sizeof(Lane);
    Pool *pool = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    if (!pool) return 0;
    memset(pool, 0, bytes);
    pool->owner = getpid();
    pool->threads = threads;
    /* Signals are for the threads that were there before. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES); /* paged_attention's buffers lie there */
    int64_t started = 1;
    for (; started < threads; started++) {
        Lane *lane = &pool->lanes[started];
        lane->pool = pool;
        if (sem_init(&lane->wake, 0, 0)) break;
        if (pthread_create(&lane->thread, &attributes, serve, lane)) {
            sem_destroy(&lane->wake);
            break;
        }
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (started < threads) pool->threads = started;
    return pool;
}

/* Ends the workers; no job may be running. The pool can still be used, without them. */
void pool_stop(Pool *pool) {
    if (pool->threads > 1 && pool->owner == getpid()) {
        __atomic_store_n(&pool->stopping, 1, __ATOMIC_SEQ_CST);
        for (int64_t i = 1; i < pool->threads; i++) {
            wake(&pool->lanes[i]);
            pthread_join(pool->lanes[i].thread, 0);
            sem_destroy(&pool->lanes[i].wake);
        }
    }
    pool->threads = 1;
}

void pool_free(Pool *pool) {
    pool_stop(pool);
    free(pool);
}
