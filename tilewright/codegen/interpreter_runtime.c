/* Run-time checks of the interpreter, see interpreter.py; compiled once for all kernels, with optimisation. */
#include "interpreter_runtime.h"

#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { TW_STACK_BYTES = 16 << 20 };

/* Clocks, for kernels whose threads meet otherwise than all at once. Every agent has a clock, and every thread knows of each agent the time before
   which all its accesses are ordered before those of the thread (`clocks`, [threads][agents]). Agents are the threads; for each barrier in memory the
   copies that complete on it, whose clock is the number of its completed phases; and for each strand the products of its tensor cores and the stores
   of the copy engine that one of its threads starts, whose clocks are the numbers of their committed groups. `gathered`: what was known to those that
   arrived in this phase; `released`: what a thread knows that waited. */
typedef struct {
    int64_t expected, missing, bytes, completed;
    int32_t *gathered, *released;
} tw_barrier;

/* A barrier of a block or of a cluster: how often all strands met, and how many wait for the next time. */
typedef struct tw_meeting {
    int64_t done, waiting;
} tw_meeting;

/* Threads in lockstep. They have a stack of their own, so that others can run while they wait. */
typedef struct {
    ucontext_t context;
    char *stack;
    int64_t first, ended, parity, meeting, thread, index;
    const struct tw_meeting *at; /* whose `meeting` is awaited, if that is not 0 */
    const tw_buffer *buffer; /* that of the barrier that is awaited, */
    tw_barrier *barrier;     /* or NULL */
} tw_strand;

/* The thread of a strand that starts stores of the copy engine, or TW_NOBODY, and the group of its last one. */
typedef struct {
    int64_t thread, last;
} tw_storing;

/* Registers in which tensor cores add: marked 2 until their group is awaited. */
typedef struct {
    uint8_t *set;
    int64_t lanes, thread, group;
} tw_flight;

typedef struct tw_clocks {
    int64_t threads, agents, width, strands, blocks; /* blocks: of a cluster */
    int64_t barrier_count, products, stores; /* products, stores: the first of these agents */
    tw_meeting *meetings; /* of each block, and of the cluster */
    int32_t *clocks, *now, *published; /* published: the time before which a thread's writes may be accessed by engines */
    int32_t *reaching; /* [block][thread]: when a thread last arrived at a barrier of the block, or read its part of a cluster's buffer */
    tw_barrier *barriers;
    tw_strand *all, *strand;
    ucontext_t scheduler;
    int32_t actor, stamp; /* the engine on whose behalf memory is accessed, 0 if none, and its time */
    int64_t called;       /* number of the instruction whose meaning a strand wants, plus 1 */
    void **operands;
    tw_flight *flights;
    int64_t flying, capacity;
    tw_storing *storing; /* of each strand */
    void (*body)(const void *environment, int64_t first);
    const void *environment;
} tw_clocks;

__attribute__((noinline, cold)) void tw_report(
    tw_state *s, int64_t kind, int64_t buffer, int64_t offset, int64_t lanes, int64_t other, int64_t writes) {
    for (int64_t i = 0; i < s->count; ++i)
        if (s->faults[i].kind == kind && s->faults[i].buffer == buffer)
            return; /* only the first of each kind per buffer */
    if (s->count < TW_FAULTS)
        s->faults[s->count++] = (tw_fault){kind, buffer, offset, lanes, s->block, s->thread, other, writes};
}

static int tw_refused(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes, int64_t writes) {
    if (offset < 0 || offset + lanes > b->size) {
        tw_report(s, TW_OUT_OF_BOUNDS, b->id, offset, lanes, 0, writes);
        return 1;
    }
    if (lanes > 1 && b->aligned && offset % (b->aligned > 1 ? b->aligned : lanes) != 0)
        tw_report(s, TW_MISALIGNED, b->id, offset, lanes, 0, writes);
    return 0;
}

/* The number of the block that runs, in its grid or cluster. */
static int64_t tw_block(const tw_state *s, const tw_buffer *b) { return b->blocks == TW_CLUSTER ? s->rank : s->block; }

/* Whether another block wrote. TW_ATOMIC_BLOCK - b stands for atomic additions by block b only, TW_ATOMIC for those by several blocks. */
static int tw_foreign(int64_t block, int64_t writer) {
    return writer != TW_NOBODY && writer != block && writer != TW_ATOMIC_BLOCK - block;
}

static tw_shadow *tw_shadow_of(const tw_state *s, const tw_buffer *b, int64_t offset) {
    tw_shadow *const e = b->shadow + offset;
    const int64_t phase = b->blocks == TW_CLUSTER ? s->meetings : s->phase;
    if (e->phase != phase) {
        e->writing_block = e->reading_block = TW_NOBODY;
        e->phase = phase;
    }
    return e;
}

static int32_t *tw_known(const tw_state *s) { return s->clocked->clocks + s->thread * s->clocked->agents; }

/* Whether nothing orders another agent's access at that time before those of the current thread. */
static int tw_apart(const tw_state *s, int32_t who, int64_t when) {
    if (s->clocked)
        return who == TW_ATOMIC || who >= 0 && when > tw_known(s)[who];
    return when >= s->epoch && who != (int32_t)s->thread;
}

/* Who read the element and is not ordered before the current thread. */
static int32_t tw_reader_apart(const tw_state *s, const tw_shadow *e) {
    if (s->clocked && e->reader == TW_SEVERAL) {
        for (int32_t who = 0; who < s->clocked->agents; ++who)
            if (e->readers[who] > tw_known(s)[who])
                return who;
        return TW_NOBODY;
    }
    return e->reader != TW_NOBODY && tw_apart(s, e->reader, e->read) ? e->reader : TW_NOBODY;
}

/* Records a read. */
static void tw_note_read(tw_state *s, tw_shadow *e) {
    tw_clocks *const c = s->clocked;
    const int32_t me = (int32_t)s->thread;
    if (!c) {
        if (e->read < s->epoch)
            e->reader = me;
        else if (e->reader != me)
            e->reader = TW_SEVERAL;
        e->read = s->epoch + s->arrived;
        return;
    }
    const int32_t who = c->actor ? c->actor : me, when = c->actor ? c->stamp : c->now[me];
    if (e->reader != TW_SEVERAL && e->reader != who && tw_reader_apart(s, e) != TW_NOBODY) {
        if (!e->readers)
            e->readers = calloc((size_t)c->agents, sizeof *e->readers);
        e->readers[e->reader] = (int32_t)e->read;
        e->reader = TW_SEVERAL;
    }
    if (e->reader == TW_SEVERAL)
        e->readers[who] = when;
    else
        e->reader = who, e->read = when;
}

/* Records a write; what was read before no longer counts. */
static void tw_note_write(tw_state *s, tw_shadow *e) {
    tw_clocks *const c = s->clocked;
    e->writer = c && c->actor ? c->actor : (int32_t)s->thread;
    e->written = !c ? s->epoch + s->arrived : c->actor ? c->stamp : c->now[s->thread];
    if (c) {
        if (e->reader == TW_SEVERAL)
            memset(e->readers, 0, (size_t)c->agents * sizeof *e->readers);
        e->reader = TW_NOBODY;
    }
}

/* An engine accesses what a thread wrote. */
static void tw_check_published(tw_state *s, const tw_buffer *b, int64_t offset, const tw_shadow *e, int64_t writes) {
    const tw_clocks *const c = s->clocked;
    if (c && c->actor && e->writer >= 0 && e->writer < c->threads && e->written > c->published[e->writer])
        tw_report(s, TW_UNPUBLISHED, b->id, offset, 1, e->writer, writes);
}

static void tw_check_read(tw_state *s, const tw_buffer *b, int64_t offset) {
    tw_shadow *e = tw_shadow_of(s, b, offset);
    if (tw_apart(s, e->writer, e->written))
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 0);
    else
        tw_check_published(s, b, offset, e, 0);
    tw_note_read(s, e);
    if (b->blocks == TW_CLUSTER && s->clocked)
        s->clocked->reaching[offset / (b->size / s->clocked->blocks) * s->clocked->threads + s->thread] = s->clocked->now[s->thread];
    if (b->blocks) {
        const int64_t block = tw_block(s, b);
        if (tw_foreign(block, e->writing_block))
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->writing_block, 0);
        if (e->reading_block == TW_NOBODY)
            e->reading_block = block;
        else if (e->reading_block != block)
            e->reading_block = TW_SEVERAL;
    }
}

static void tw_check_write(tw_state *s, const tw_buffer *b, int64_t offset) {
    tw_shadow *e = tw_shadow_of(s, b, offset);
    const int32_t reader = tw_reader_apart(s, e);
    if (tw_apart(s, e->writer, e->written))
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 1);
    else if (reader != TW_NOBODY)
        tw_report(s, TW_RACE, b->id, offset, 1, reader, 1);
    tw_note_write(s, e);
    if (b->blocks) {
        const int64_t block = tw_block(s, b);
        if (tw_foreign(block, e->writing_block))
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->writing_block, 1);
        else if (e->reading_block != TW_NOBODY && e->reading_block != block)
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->reading_block, 1);
        e->writing_block = block;
    }
}

const void *tw_read(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (tw_refused(s, b, offset, lanes, 0))
        return memset(s->scratch, 0, sizeof s->scratch);
    if (b->set)
        for (int64_t i = 0; i < lanes; ++i)
            if (b->set[offset + i] != 1)
                tw_report(s, b->set[offset + i] ? TW_IN_FLIGHT : TW_UNINITIALISED, b->id, offset + i, lanes, 0, 0);
    if (b->shadow)
        for (int64_t i = 0; i < lanes; ++i)
            tw_check_read(s, b, offset + i);
    return b->data + offset * b->bytes;
}

/* A read by all lanes of a warp. Checking two lanes suffices: at least one of them differs from the thread that wrote the element. */
const void *tw_read_together(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    const void *const place = tw_read(s, b, offset, lanes);
    s->thread ^= 1;
    (void)tw_read(s, b, offset, lanes);
    s->thread ^= 1;
    return place;
}

void *tw_write(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (!b->writable)
        tw_report(s, TW_READ_ONLY, b->id, offset, lanes, 0, 1);
    if (tw_refused(s, b, offset, lanes, 1) || !b->writable)
        return s->scratch;
    if (b->set && s->clocked)
        for (int64_t i = 0; i < lanes; ++i)
            if (b->set[offset + i] == 2)
                tw_report(s, TW_IN_FLIGHT, b->id, offset + i, lanes, 0, 1);
    if (b->set)
        memset(b->set + offset, 1, (size_t)lanes);
    if (b->shadow)
        for (int64_t i = 0; i < lanes; ++i)
            tw_check_write(s, b, offset + i);
    return b->data + offset * b->bytes;
}

/* Atomic additions by several threads or blocks do not race with one another, but with every other access to the element. */
static void tw_check_atomic(tw_state *s, const tw_buffer *b, int64_t offset) {
    tw_shadow *e = tw_shadow_of(s, b, offset);
    const int32_t reader = tw_reader_apart(s, e);
    if (e->writer != TW_ATOMIC && tw_apart(s, e->writer, e->written))
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 1);
    else if (reader != TW_NOBODY)
        tw_report(s, TW_RACE, b->id, offset, 1, reader, 1);
    tw_note_write(s, e);
    e->writer = TW_ATOMIC;
    if (b->blocks) {
        const int64_t block = tw_block(s, b);
        const int foreign = tw_foreign(block, e->writing_block), atomic = e->writing_block <= TW_ATOMIC;
        if (foreign && !atomic)
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->writing_block, 1);
        else if (e->reading_block != TW_NOBODY && e->reading_block != block)
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->reading_block, 1);
        if (foreign)
            e->writing_block = TW_ATOMIC;
        else if (e->writing_block == TW_NOBODY)
            e->writing_block = TW_ATOMIC_BLOCK - block;
    }
}

void *tw_atomic(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (!b->writable)
        tw_report(s, TW_READ_ONLY, b->id, offset, lanes, 0, 1);
    if (tw_refused(s, b, offset, lanes, 1) || !b->writable)
        return memset(s->scratch, 0, sizeof s->scratch);
    for (int64_t i = 0; i < lanes; ++i) {
        if (b->set && !b->set[offset + i])
            tw_report(s, TW_UNINITIALISED, b->id, offset + i, lanes, 0, 0);
        if (b->shadow)
            tw_check_atomic(s, b, offset + i);
    }
    return b->data + offset * b->bytes;
}

/* A barrier of the grid: every block has added 1 to the counter, which must then be the number of arrivals that it waits for. */
void tw_meet(tw_state *s, const tw_buffer *counter, int64_t offset, int64_t blocks, int64_t arrivals) {
    s->thread = 0;
    int32_t *const place = tw_atomic(s, counter, offset, 1);
    *place += (int32_t)blocks;
    if (*place != arrivals)
        tw_report(s, TW_DIVERGENCE, -1, *place, blocks, arrivals, 0);
    ++s->phase;
}

/* The target of a copy that starts here: the value is stored at once, but counts as unwritten until the copy is awaited. */
void *tw_copy(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    void *place = tw_write(s, b, offset, lanes);
    if (place == (void *)s->scratch)
        return place;
    if (b->set)
        memset(b->set + offset, 0, (size_t)lanes);
    if (s->copying == s->capacity) {
        s->capacity = 2 * s->capacity + 64;
        s->copies = realloc(s->copies, (size_t)s->capacity * sizeof *s->copies);
    }
    s->copies[s->copying++] = (tw_pending){b, offset, lanes, s->thread, s->groups[s->thread]};
    return place;
}

void tw_await(tw_state *s, int64_t pending) {
    int64_t kept = 0;
    for (int64_t i = 0; i < s->copying; ++i) {
        const tw_pending c = s->copies[i];
        if (c.thread != s->thread || c.group >= s->groups[s->thread] - pending)
            s->copies[kept++] = c;
        else
            (void)tw_write(s, c.buffer, c.offset, c.lanes);
    }
    s->copying = kept;
}

void tw_no_copies(tw_state *s, int64_t threads) {
    s->copying = 0;
    memset(s->groups, 0, (size_t)threads * sizeof *s->groups);
}

void tw_forget(const tw_buffer *b) { memset(b->set, 0, (size_t)b->size); }

/* The place of a shared buffer gets another owner: no thread may have accessed it since the last barrier. */
void tw_left(tw_state *s, const tw_buffer *b) {
    for (int64_t i = 0; i < b->size; ++i) {
        const tw_shadow *e = b->shadow + i;
        if (e->written >= s->epoch || e->read >= s->epoch)
            tw_report(s, TW_RACE, b->id, i, 1, e->written >= s->epoch ? e->writer : e->reader, 1);
    }
}

tw_shadow *tw_cleared(void *place, int64_t size) {
    tw_shadow *all = place;
    for (int64_t i = 0; i < size; ++i)
        all[i] = (tw_shadow){-1, -1, TW_NOBODY, TW_NOBODY, TW_NOBODY, TW_NOBODY, 0, NULL};
    return all;
}

tw_shadow *tw_shadows(int64_t size) {
    return tw_cleared(malloc((size_t)(size ? size : 1) * sizeof(tw_shadow)), size);
}

void tw_free_shadows(const tw_buffer *b) {
    for (int64_t i = 0; i < b->size; ++i)
        free(b->shadow[i].readers);
    free(b->shadow);
}

/* --- clocks ------------------------------------------------------------------------------------------------------- */

void tw_start_clocks(tw_state *s, int64_t threads, int64_t width, int64_t barriers, int64_t blocks) {
    tw_clocks *const c = s->clocked = calloc(1, sizeof *c);
    c->threads = threads, c->width = width, c->strands = threads / width, c->blocks = blocks;
    c->barrier_count = barriers, c->products = threads + barriers, c->stores = c->products + c->strands, c->agents = c->stores + c->strands;
    c->clocks = calloc((size_t)(threads * c->agents), sizeof *c->clocks);
    c->now = calloc((size_t)c->agents, sizeof *c->now);
    c->published = calloc((size_t)threads, sizeof *c->published);
    c->reaching = calloc((size_t)(threads * blocks), sizeof *c->reaching);
    c->barriers = calloc((size_t)(barriers ? barriers : 1), sizeof *c->barriers);
    c->meetings = calloc((size_t)blocks + 1, sizeof *c->meetings);
    for (int64_t i = 0; i < barriers; ++i) {
        c->barriers[i].gathered = calloc((size_t)c->agents, sizeof *c->now);
        c->barriers[i].released = calloc((size_t)c->agents, sizeof *c->now);
    }
    c->storing = calloc((size_t)c->strands, sizeof *c->storing);
    c->all = calloc((size_t)c->strands, sizeof *c->all);
    for (int64_t i = 0; i < c->strands; ++i)
        c->all[i].stack = malloc((size_t)TW_STACK_BYTES);
}

void tw_end_clocks(tw_state *s) {
    tw_clocks *const c = s->clocked;
    for (int64_t i = 0; i < c->barrier_count; ++i) {
        free(c->barriers[i].gathered);
        free(c->barriers[i].released);
    }
    for (int64_t i = 0; i < c->strands; ++i)
        free(c->all[i].stack);
    free(c->clocks), free(c->now), free(c->published), free(c->reaching), free(c->barriers), free(c->meetings), free(c->all), free(c->flights), free(c->storing);
    free(c);
}

static void tw_merge(const tw_clocks *c, int32_t *into, const int32_t *from) {
    for (int64_t i = 0; i < c->agents; ++i)
        if (from[i] > into[i])
            into[i] = from[i];
}

/* What the thread does from now on is not yet ordered for those that learn its time. */
static void tw_tick(tw_state *s) { tw_known(s)[s->thread] = ++s->clocked->now[s->thread]; }

/* A barrier of some threads. */
void tw_join(tw_state *s, int64_t first, int64_t count) {
    tw_clocks *const c = s->clocked;
    int32_t *const all = c->clocks + first * c->agents;
    for (int64_t i = 1; i < count; ++i)
        tw_merge(c, all, all + i * c->agents);
    for (int64_t i = 1; i < count; ++i)
        memcpy(all + i * c->agents, all, (size_t)c->agents * sizeof *all);
    for (s->thread = first; s->thread < first + count; ++s->thread)
        tw_tick(s);
    s->thread = first;
}

/* The strand waits, and others run. */
static void tw_pause(tw_clocks *c) {
    tw_strand *const mine = c->strand;
    swapcontext(&mine->context, &c->scheduler);
}

int64_t tw_least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A barrier of the cluster, or of the strand's block; the last strand that reaches it joins all. */
void tw_meet_strands(tw_state *s, int64_t cluster) {
    tw_clocks *const c = s->clocked;
    tw_strand *const mine = c->strand;
    const int64_t threads = cluster ? c->threads : c->threads / c->blocks, block = mine->first / threads;
    tw_meeting *const at = c->meetings + (cluster ? c->blocks : block);
    const int64_t meeting = at->done + 1;
    mine->at = at, mine->meeting = meeting;
    if (++at->waiting == threads / c->width) {
        at->waiting = 0, at->done = meeting, s->meetings += cluster;
        tw_join(s, block * threads, threads);
    }
    while (at->done < meeting)
        tw_pause(c);
    mine->meeting = 0;
}

void tw_publish(tw_state *s) {
    s->clocked->published[s->thread] = s->clocked->now[s->thread];
    tw_tick(s);
}

/* The barrier at a place, of an array whose first one has the number `first`; NULL if it is outside of the array or not initialised. */
static tw_barrier *tw_barrier_at(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first) {
    if (tw_read(s, b, offset, 1) == (const void *)s->scratch || !b->set[offset])
        return NULL;
    return s->clocked->barriers + first + offset;
}

void tw_initialise(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t arrivals) {
    if (tw_write(s, b, offset, 1) == (void *)s->scratch)
        return;
    tw_barrier *const barrier = s->clocked->barriers + first + offset;
    barrier->expected = barrier->missing = arrivals, barrier->bytes = barrier->completed = 0;
}

static void tw_complete(tw_clocks *c, tw_barrier *barrier) {
    if (barrier->missing || barrier->bytes)
        return;
    const int64_t agent = c->threads + (barrier - c->barriers);
    barrier->gathered[agent] = ++c->now[agent];
    tw_merge(c, barrier->released, barrier->gathered);
    memset(barrier->gathered, 0, (size_t)c->agents * sizeof *barrier->gathered);
    barrier->missing = barrier->expected;
    ++barrier->completed;
}

void tw_signal(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t bytes) {
    tw_barrier *const barrier = tw_barrier_at(s, b, offset, first);
    if (!barrier)
        return;
    tw_clocks *const c = s->clocked;
    const int64_t each = c->barrier_count / c->blocks;
    c->reaching[(barrier - c->barriers) / each * c->threads + s->thread] = c->now[s->thread];
    tw_merge(c, barrier->gathered, tw_known(s));
    tw_tick(s);
    barrier->bytes += bytes;
    --barrier->missing;
    tw_complete(c, barrier);
}

/* Reports threads that reach into blocks which may have ended by then: none of their threads knows of it. */
static void tw_check_ends(tw_state *s) {
    const tw_clocks *const c = s->clocked;
    const int64_t each = c->threads / c->blocks;
    for (int64_t block = 0; block < c->blocks; ++block)
        for (s->thread = 0; s->thread < c->threads; ++s->thread) {
            int32_t known = 0;
            for (int64_t i = block * each; i < (block + 1) * each; ++i)
                if (c->clocks[i * c->agents + s->thread] > known)
                    known = c->clocks[i * c->agents + s->thread];
            if (c->reaching[block * c->threads + s->thread] > known)
                tw_report(s, TW_ENDED, -1, block, 1, 0, 0);
        }
}

/* `count` threads wait for the phase of the parity. */
void tw_wait(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t parity, int64_t count) {
    tw_clocks *const c = s->clocked;
    const int64_t thread = s->thread;
    tw_barrier *const barrier = tw_barrier_at(s, b, offset, first);
    if (!barrier)
        return;
    tw_strand *const mine = c->strand;
    mine->barrier = barrier, mine->parity = parity, mine->thread = thread, mine->buffer = b, mine->index = offset;
    while ((barrier->completed & 1) == parity)
        tw_pause(c);
    mine->barrier = NULL;
    for (s->thread = thread; s->thread < thread + count; ++s->thread)
        tw_merge(c, tw_known(s), barrier->released);
    s->thread = thread;
}

/* --- engines ------------------------------------------------------------------------------------------------------ */

static int64_t tw_swizzled(int64_t address, int64_t swizzle) { return swizzle ? address ^ (address >> 3 & (swizzle - 16)) : address; }

/* Copies one element of a box, or a zero if it is outside of the tensor. */
static void tw_copy_element(tw_state *s, const tw_buffer *to, int64_t offset, const tw_buffer *from, const tw_map *map, const int64_t *at) {
    int64_t source = map->offset, inside = 1;
    for (int64_t i = 0; i < map->rank; ++i) {
        inside &= at[i] >= 0 && at[i] < map->extents[i];
        source += at[i] * map->strides[i];
    }
    char value[8] = {0};
    if (inside)
        memcpy(value, tw_read(s, from, source, 1), (size_t)map->size);
    memcpy(tw_write(s, to, tw_swizzled(offset * map->size, map->swizzle) / map->size, 1), value, (size_t)map->size);
}

/* The engine takes boxes from places at whole 128 bytes. */
static void tw_check_box(tw_state *s, const tw_buffer *b, int64_t offset, int64_t size, int64_t writes) {
    if (offset * size % 128)
        tw_report(s, TW_MISALIGNED, b->id, offset, 1, 0, writes);
}

/* A copy of a box, which takes place at once; for other agents it is ordered by the phase of the barrier. `at`: its coordinates, then the offsets of
   the filter. */
void tw_copy_box(tw_state *s, const tw_buffer *to, int64_t offset, const tw_buffer *from, const tw_map *map, const int64_t *at,
    const tw_buffer *b, int64_t index, int64_t first) {
    tw_clocks *const c = s->clocked;
    c->actor = (int32_t)(c->threads + first + index), c->stamp = c->now[c->actor] + 1;
    tw_barrier *const barrier = tw_barrier_at(s, b, index, first);
    tw_check_box(s, to, offset, map->size, 1);
    if (barrier) {
        int64_t pixels = 1, place[5], row = map->box[0], spatial = map->spatial;
        for (int64_t i = 1; i < (spatial ? 2 : map->rank); ++i)
            pixels *= map->box[i];
        int64_t pixel[5];
        memcpy(pixel, at, sizeof pixel);
        for (int64_t p = 0; p < pixels; ++p) {
            int64_t rest = p;
            for (int64_t i = 1; i < map->rank; ++i) {
                place[i] = spatial ? pixel[i] + (i <= spatial ? at[map->rank + i - 1] : 0) : at[i] + rest % map->box[i];
                rest = spatial ? rest : rest / map->box[i];
            }
            for (int64_t i = 0; i < row; ++i) {
                place[0] = at[0] + i;
                tw_copy_element(s, to, offset + p * row + i, from, map, place);
            }
            for (int64_t i = 1; spatial && i < map->rank; ++i) {
                if (i > spatial) {
                    ++pixel[i];
                    break;
                }
                pixel[i] += map->steps[i - 1];
                if (pixel[i] < map->extents[i] + map->upper[i - 1])
                    break;
                pixel[i] = map->lower[i - 1];
            }
        }
        barrier->bytes -= pixels * row * map->size;
        tw_complete(c, barrier);
    }
    c->actor = 0;
}

/* A store of a box, which takes place at once; until its group was awaited the engine may still read shared memory, and nothing in the block orders
   what it stores ahead of other accesses. What is beyond the end of the tensor is neither read nor stored; a box does not begin before it. */
void tw_store_box(tw_state *s, const tw_buffer *from, int64_t offset, const tw_buffer *to, const tw_map *map, const int64_t *at) {
    tw_clocks *const c = s->clocked;
    const int64_t strand = s->thread / c->width;
    tw_storing *const storing = c->storing + strand;
    if (storing->thread != TW_NOBODY && storing->thread != s->thread)
        tw_report(s, TW_STORES, from->id, offset, 1, storing->thread, 0);
    int64_t elements = 1;
    for (int64_t i = 0; i < map->rank; ++i)
        elements *= map->box[i];
    c->actor = (int32_t)(c->stores + strand), c->stamp = c->now[c->actor] + 1;
    *storing = (tw_storing){s->thread, c->stamp};
    tw_check_box(s, from, offset, map->size, 0);
    for (int64_t i = 0; i < map->rank; ++i)
        if (at[i] < 0)
            tw_report(s, TW_OUT_OF_BOUNDS, to->id, at[i], 1, 0, 1);
    for (int64_t n = 0; n < elements; ++n) {
        int64_t rest = n, target = map->offset, inside = 1;
        for (int64_t i = 0; i < map->rank; ++i) {
            const int64_t place = at[i] + rest % map->box[i];
            rest /= map->box[i];
            inside &= place >= 0 && place < map->extents[i];
            target += place * map->strides[i];
        }
        if (!inside)
            continue;
        const int64_t source = tw_swizzled((offset + n) * map->size, map->swizzle) / map->size;
        const void *const value = tw_read(s, from, source, 1);
        c->stamp = INT32_MAX;
        memcpy(tw_write(s, to, target, 1), value, (size_t)map->size);
        c->stamp = c->now[c->actor] + 1;
    }
    c->actor = 0;
}

/* Stores that the thread started since the last time form a group. */
void tw_commit_stores(tw_state *s) {
    tw_clocks *const c = s->clocked;
    if (c->storing[s->thread / c->width].thread == s->thread)
        ++c->now[c->stores + s->thread / c->width];
}

/* Of the groups that the thread committed, all but the youngest no longer read shared memory. */
void tw_await_stores(tw_state *s, int64_t pending) {
    tw_clocks *const c = s->clocked;
    const int64_t agent = c->stores + s->thread / c->width;
    if (c->storing[s->thread / c->width].thread == s->thread && tw_known(s)[agent] < c->now[agent] - pending)
        tw_known(s)[agent] = (int32_t)(c->now[agent] - pending);
}

/* Elements of an operand of tensor cores, at strides from a place; element by element because of the swizzle. Each warp must have awaited them. */
void tw_gather(tw_state *s, void *to, const tw_buffer *b, int64_t place, int64_t dimensions, const int64_t *shape, const int64_t *strides,
    int64_t swizzle) {
    tw_clocks *const c = s->clocked;
    const int64_t first = s->thread;
    int64_t count = 1;
    for (int64_t i = 0; i < dimensions; ++i)
        count *= shape[i];
    c->actor = (int32_t)(c->products + first / c->width), c->stamp = c->now[c->actor] + 1;
    for (int64_t n = 0; n < count; ++n) {
        int64_t rest = n, offset = place;
        for (int64_t i = dimensions - 1; i >= 0; --i) {
            offset += rest % shape[i] * strides[i];
            rest /= shape[i];
        }
        offset = tw_swizzled(offset * b->bytes, swizzle) / b->bytes;
        for (s->thread = first; s->thread < first + c->width; s->thread += 32)
            memcpy((char *)to + n * b->bytes, tw_read(s, b, offset, 1), (size_t)b->bytes);
    }
    s->thread = first;
    c->actor = 0;
}

/* Registers to which tensor cores add. Those of an earlier product that is not awaited may be used: products run in order. */
const void *tw_read_flying(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (offset >= 0 && offset + lanes <= b->size && b->set[offset] == 2)
        return b->data + offset * b->bytes;
    return tw_read(s, b, offset, lanes);
}

void *tw_write_flying(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    tw_clocks *const c = s->clocked;
    const int64_t group = c->now[c->products + s->thread / c->width] + 1;
    if (tw_refused(s, b, offset, lanes, 1))
        return s->scratch;
    memset(b->set + offset, 2, (size_t)lanes);
    int64_t found = 0;
    while (found < c->flying && (c->flights[found].set != b->set + offset || c->flights[found].lanes != lanes))
        ++found;
    if (found == c->capacity) {
        c->capacity = 2 * c->capacity + 128;
        c->flights = realloc(c->flights, (size_t)c->capacity * sizeof *c->flights);
    }
    c->flights[found] = (tw_flight){b->set + offset, lanes, s->thread, group};
    if (found == c->flying)
        ++c->flying;
    return b->data + offset * b->bytes;
}

void tw_commit_products(tw_state *s) { ++s->clocked->now[s->clocked->products + s->thread / s->clocked->width]; }

void tw_await_products(tw_state *s, int64_t pending) {
    tw_clocks *const c = s->clocked;
    const int64_t first = s->thread, agent = c->products + first / c->width, done = c->now[agent] - pending;
    for (int64_t i = first; i < first + c->width; ++i)
        if (c->clocks[i * c->agents + agent] < done)
            c->clocks[i * c->agents + agent] = (int32_t)done;
    int64_t kept = 0;
    for (int64_t i = 0; i < c->flying; ++i) {
        const tw_flight f = c->flights[i];
        if (f.group > done || f.thread < first || f.thread >= first + c->width)
            c->flights[kept++] = f;
        else
            memset(f.set, 1, (size_t)f.lanes);
    }
    c->flying = kept;
}

/* --- strands ------------------------------------------------------------------------------------------------------ */

static _Thread_local tw_clocks *tw_entering;

static void tw_enter(void) {
    tw_clocks *const c = tw_entering;
    tw_strand *const mine = c->strand;
    c->body(c->environment, mine->first);
    mine->ended = 1;
    tw_pause(c);
}

/* Applies an instruction's meaning, on the stack of the scheduler if called from a strand. */
void tw_call(tw_state *s, tw_meaning meaning, int64_t number, void **operands) {
    tw_clocks *const c = s->clocked;
    if (!c) {
        meaning(number, operands);
        return;
    }
    c->called = number + 1, c->operands = operands;
    tw_pause(c);
}

/* Runs a block: strands in turn until all have ended, or all wait for what never happens. */
void tw_run_strands(tw_state *s, void (*body)(const void *, int64_t), const void *environment, tw_meaning meaning) {
    tw_clocks *const c = s->clocked;
    c->body = body, c->environment = environment, s->stopped = c->flying = c->actor = 0;
    for (int64_t i = c->threads; i < c->agents; ++i)
        ++c->now[i]; /* what was not awaited ends with the block */
    for (int64_t i = 0; i < c->barrier_count; ++i) {
        tw_barrier *const b = c->barriers + i;
        b->bytes = 0;
        memset(b->gathered, 0, (size_t)c->agents * sizeof *b->gathered);
    }
    memset(c->meetings, 0, (size_t)(c->blocks + 1) * sizeof *c->meetings);
    for (int64_t i = 0; i < c->strands; ++i)
        c->storing[i] = (tw_storing){TW_NOBODY, 0};
    memset(c->reaching, 0, (size_t)(c->threads * c->blocks) * sizeof *c->reaching);
    memcpy(c->clocks, c->now, (size_t)c->agents * sizeof *c->now);
    tw_join(s, 0, c->threads);
    for (int64_t i = 0; i < c->strands; ++i) {
        tw_strand *const one = c->all + i;
        one->first = i * c->width, one->ended = one->meeting = 0, one->barrier = NULL;
        getcontext(&one->context);
        one->context.uc_stack.ss_sp = one->stack, one->context.uc_stack.ss_size = TW_STACK_BYTES, one->context.uc_link = NULL;
        makecontext(&one->context, tw_enter, 0);
    }
    for (int64_t progress = 1, left = c->strands; left && progress && !s->stopped;) {
        progress = 0;
        for (int64_t i = 0; i < c->strands && !s->stopped; ++i) {
            tw_strand *const one = c->all + i;
            if (one->ended || one->barrier && (one->barrier->completed & 1) == one->parity || one->meeting && one->meeting > one->at->done)
                continue;
            progress = 1;
            do {
                c->strand = one, c->called = 0, tw_entering = c, s->rank = one->first / (c->threads / c->blocks);
                swapcontext(&c->scheduler, &one->context);
                if (c->called)
                    meaning(c->called - 1, c->operands);
            } while (c->called);
            left -= one->ended;
        }
    }
    for (int64_t i = 0; i < c->strands && !s->stopped; ++i) {
        const tw_strand *const one = c->all + i;
        if (one->ended)
            continue;
        s->thread = one->barrier ? one->thread : one->first;
        if (one->barrier)
            tw_report(s, TW_DEADLOCK, one->buffer->id, one->index, one->barrier->missing, one->barrier->bytes, one->parity);
        else
            tw_report(s, TW_DEADLOCK, -1, 0, 0, 0, 0);
    }
    for (int64_t i = 0; i < c->strands; ++i)
        if (!c->all[i].ended)
            return;
    for (int64_t i = 0; i < c->barrier_count; ++i)
        if (c->barriers[i].bytes)
            tw_report(s, TW_BYTES, -2 - i, i, 1, c->barriers[i].bytes, 0);
    for (int64_t i = 0; i < c->strands; ++i)
        if (c->storing[i].thread != TW_NOBODY && c->clocks[c->storing[i].thread * c->agents + c->stores + i] < c->storing[i].last) {
            s->thread = c->storing[i].thread;
            tw_report(s, TW_STORES, -1, 0, 1, 0, 0);
        }
    tw_check_ends(s);
}
