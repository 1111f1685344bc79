/* Run-time checks of the interpreter, see interpreter.py. Every access of a kernel goes through tw_read or tw_write. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TW_OUT_OF_BOUNDS, TW_UNINITIALISED, TW_RACE, TW_BLOCK_RACE, TW_MISALIGNED, TW_DIVERGENCE, TW_READ_ONLY };
enum { TW_FAULTS = 64, TW_NOBODY = -1, TW_SEVERAL = -2, TW_ATOMIC = -3, TW_ATOMIC_BLOCK = -10 };
enum { TW_GRID = 1, TW_CLUSTER = 2 };

typedef struct {
    int64_t kind, buffer, offset, lanes, block, thread, other, writes;
} tw_fault;

/* The last epoch (time between two barriers) in which an element was written and read, by which threads, and by which blocks since the last barrier
   of the grid, or of the cluster for its shared memory, which began the phase. Accesses between arrival at a barrier and its end count as of the next
   epoch, and are compared with those of both. */
typedef struct {
    int64_t written, read;
    int32_t writer, reader;
    int64_t writing_block, reading_block, phase;
} tw_shadow;
_Static_assert(sizeof(tw_shadow) == 48, "checked.py reserves 48 bytes");

typedef struct {
    char *data;
    int64_t size;
    int32_t bytes, id;
    uint8_t *set;      /* per element: whether it was written; NULL: all were */
    tw_shadow *shadow; /* NULL: no race is possible */
    int32_t blocks; /* whose blocks access it: TW_GRID, TW_CLUSTER, 0: only one */
    int32_t aligned, writable;
} tw_buffer;

/* An asynchronous copy that its thread has not awaited; its elements count as not written. */
typedef struct {
    const tw_buffer *buffer;
    int64_t offset, lanes, thread, group;
} tw_pending;

typedef struct {
    tw_fault *faults;
    int64_t count, block, thread, epoch, arrived, phase, rank, meetings;
    tw_pending *copies;
    int64_t copying, capacity;
    int64_t groups[262144]; /* per thread: number of committed groups of copies */
    char scratch[1024];   /* target of accesses out of bounds */
} tw_state;

/* Runs the meaning of an instruction, given by number, on its operands, [lanes][elements]; the result replaces the operand that it writes. */
typedef void (*tw_meaning)(int64_t number, void **operands);

static __attribute__((noinline, cold)) void tw_report(
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

static void tw_check_read(tw_state *s, const tw_buffer *b, int64_t offset) {
    tw_shadow *e = tw_shadow_of(s, b, offset);
    const int32_t me = (int32_t)s->thread;
    if (e->written >= s->epoch && e->writer != me)
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 0);
    if (e->read < s->epoch)
        e->reader = me;
    else if (e->reader != me)
        e->reader = TW_SEVERAL;
    e->read = s->epoch + s->arrived;
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
    const int32_t me = (int32_t)s->thread;
    if (e->written >= s->epoch && e->writer != me)
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 1);
    else if (e->read >= s->epoch && e->reader != me)
        tw_report(s, TW_RACE, b->id, offset, 1, e->reader, 1);
    e->written = s->epoch + s->arrived;
    e->writer = me;
    if (b->blocks) {
        const int64_t block = tw_block(s, b);
        if (tw_foreign(block, e->writing_block))
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->writing_block, 1);
        else if (e->reading_block != TW_NOBODY && e->reading_block != block)
            tw_report(s, TW_BLOCK_RACE, b->id, offset, 1, e->reading_block, 1);
        e->writing_block = block;
    }
}

static const void *tw_read(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (tw_refused(s, b, offset, lanes, 0))
        return memset(s->scratch, 0, sizeof s->scratch);
    if (b->set)
        for (int64_t i = 0; i < lanes; ++i)
            if (!b->set[offset + i])
                tw_report(s, TW_UNINITIALISED, b->id, offset + i, lanes, 0, 0);
    if (b->shadow)
        for (int64_t i = 0; i < lanes; ++i)
            tw_check_read(s, b, offset + i);
    return b->data + offset * b->bytes;
}

/* A read by all lanes of a warp. Checking two lanes suffices: at least one of them differs from the thread that wrote the element. */
static const void *tw_read_together(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    const void *const place = tw_read(s, b, offset, lanes);
    s->thread ^= 1;
    (void)tw_read(s, b, offset, lanes);
    s->thread ^= 1;
    return place;
}

static void *tw_write(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
    if (!b->writable)
        tw_report(s, TW_READ_ONLY, b->id, offset, lanes, 0, 1);
    if (tw_refused(s, b, offset, lanes, 1) || !b->writable)
        return s->scratch;
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
    const int32_t me = (int32_t)s->thread;
    if (e->written >= s->epoch && e->writer != me && e->writer != TW_ATOMIC)
        tw_report(s, TW_RACE, b->id, offset, 1, e->writer, 1);
    else if (e->read >= s->epoch && e->reader != me)
        tw_report(s, TW_RACE, b->id, offset, 1, e->reader, 1);
    e->written = s->epoch + s->arrived;
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

static void *tw_atomic(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
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
static void tw_meet(tw_state *s, const tw_buffer *counter, int64_t offset, int64_t blocks, int64_t arrivals) {
    s->thread = 0;
    int32_t *const place = tw_atomic(s, counter, offset, 1);
    *place += (int32_t)blocks;
    if (*place != arrivals)
        tw_report(s, TW_DIVERGENCE, -1, *place, blocks, arrivals, 0);
    ++s->phase;
}

/* The target of a copy that starts here: the value is stored at once, but counts as unwritten until the copy is awaited. */
static void *tw_copy(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes) {
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

static void tw_await(tw_state *s, int64_t pending) {
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

static void tw_no_copies(tw_state *s, int64_t threads) {
    s->copying = 0;
    memset(s->groups, 0, (size_t)threads * sizeof *s->groups);
}

static void tw_forget(const tw_buffer *b) { memset(b->set, 0, (size_t)b->size); }

/* The place of a shared buffer gets another owner: no thread may have accessed it since the last barrier. */
static void tw_left(tw_state *s, const tw_buffer *b) {
    for (int64_t i = 0; i < b->size; ++i) {
        const tw_shadow *e = b->shadow + i;
        if (e->written >= s->epoch || e->read >= s->epoch)
            tw_report(s, TW_RACE, b->id, i, 1, e->written >= s->epoch ? e->writer : e->reader, 1);
    }
}

static tw_shadow *tw_cleared(void *place, int64_t size) {
    tw_shadow *all = place;
    for (int64_t i = 0; i < size; ++i)
        all[i] = (tw_shadow){-1, -1, TW_NOBODY, TW_NOBODY, TW_NOBODY, TW_NOBODY, 0};
    return all;
}

static tw_shadow *tw_shadows(int64_t size) {
    return tw_cleared(malloc((size_t)(size ? size : 1) * sizeof(tw_shadow)), size);
}
