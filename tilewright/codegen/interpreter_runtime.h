/* What a kernel in the interpreter calls,
    see interpreter.py: every access goes through tw_read or tw_write. The functions are described where they are
   defined, in interpreter_runtime.c. */
#include <stddef.h>
#include <stdint.h>

/* What kernels take from the C library: its headers take longer to read than most kernels. */
void *calloc(size_t, size_t);
void *aligned_alloc(size_t, size_t);
void free(void *);
void *memcpy(void *restrict, const void *restrict, size_t);
void *memset(void *, int, size_t);

enum {
    TW_OUT_OF_BOUNDS, TW_UNINITIALISED, TW_RACE, TW_BLOCK_RACE, TW_MISALIGNED, TW_DIVERGENCE, TW_READ_ONLY, TW_DEADLOCK, TW_IN_FLIGHT, TW_UNPUBLISHED,
    TW_BYTES, TW_ENDED, TW_STORES
};
enum { TW_FAULTS = 64, TW_NOBODY = -1, TW_SEVERAL = -2, TW_ATOMIC = -3, TW_ATOMIC_BLOCK = -10 };
enum { TW_GRID = 1, TW_CLUSTER = 2 };

typedef struct {
    int64_t kind, buffer, offset, lanes, block, thread, other, writes;
} tw_fault;

/* When an element was last written and read, by which agents, and by which blocks since the last barrier of the grid,
    or of the cluster for its shared
   memory, which began the phase. An agent is a thread or an engine (below), and its time the epoch (between two barriers) or,
    in a kernel with clocks,
   the agent's own. Accesses between arrival at a barrier and its end count as of the next epoch, and are compared with those of both. `readers`: with
   clocks and several readers, the last time that each agent read the element, or 0. */
typedef struct {
    int64_t written, read;
    int32_t writer, reader;
    int64_t writing_block, reading_block, phase;
    int32_t *readers;
} tw_shadow;
_Static_assert(sizeof(tw_shadow) == 56, "checked.py reserves 56 bytes");

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
    int64_t stopped;           /* whether a strand met a fault after which none can go on */
    struct tw_clocks *clocked; /* NULL: without clocks */
    tw_pending *copies;
    int64_t copying, capacity;
    int64_t groups[262144]; /* per thread: number of committed groups of copies */
    char scratch[1024];   /* target of accesses out of bounds */
} tw_state;

/* Runs the meaning of an instruction, given by number, on its operands, [lanes][elements]; the result replaces the operand that it writes. */
typedef void (*tw_meaning)(int64_t number, void **operands);

/* A tensor map (ir/tensor_map.py). */
typedef struct {
    int64_t rank, size, swizzle, offset, spatial;
    int64_t extents[5], strides[5], box[5], lower[3], upper[3], steps[3];
} tw_map;

void tw_report(tw_state *s, int64_t kind, int64_t buffer, int64_t offset, int64_t lanes, int64_t other, int64_t writes);
int64_t tw_least(int64_t a, int64_t b);
const void *tw_read(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
const void *tw_read_together(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void *tw_write(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void *tw_atomic(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void tw_meet(tw_state *s, const tw_buffer *counter, int64_t offset, int64_t blocks, int64_t arrivals);
void *tw_copy(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void tw_await(tw_state *s, int64_t pending);
void tw_no_copies(tw_state *s, int64_t threads);
void tw_forget(const tw_buffer *b);
void tw_left(tw_state *s, const tw_buffer *b);
tw_shadow *tw_cleared(void *place, int64_t size);
tw_shadow *tw_shadows(int64_t size);
void tw_free_shadows(const tw_buffer *b);
void tw_start_clocks(tw_state *s, int64_t threads, int64_t width, int64_t barriers, int64_t blocks);
void tw_end_clocks(tw_state *s);
void tw_join(tw_state *s, int64_t first, int64_t count);
void tw_meet_strands(tw_state *s, int64_t cluster);
void tw_publish(tw_state *s);
void tw_initialise(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t arrivals);
void tw_signal(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t bytes);
void tw_wait(tw_state *s, const tw_buffer *b, int64_t offset, int64_t first, int64_t parity, int64_t count);
void tw_copy_box(tw_state *s, const tw_buffer *to, int64_t offset, const tw_buffer *from, const tw_map *map, const int64_t *at, const tw_buffer *b,
    int64_t index, int64_t first);
void tw_store_box(tw_state *s, const tw_buffer *from, int64_t offset, const tw_buffer *to, const tw_map *map, const int64_t *at);
void tw_commit_stores(tw_state *s);
void tw_await_stores(tw_state *s, int64_t pending);
void tw_gather(tw_state *s, void *to, const tw_buffer *b, int64_t place, int64_t dimensions, const int64_t *shape, const int64_t *strides,
    int64_t swizzle);
const void *tw_read_flying(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void *tw_write_flying(tw_state *s, const tw_buffer *b, int64_t offset, int64_t lanes);
void tw_commit_products(tw_state *s);
void tw_await_products(tw_state *s, int64_t pending);
void tw_call(tw_state *s, tw_meaning meaning, int64_t number, void **operands);
void tw_run_strands(tw_state *s, void (*body)(const void *, int64_t), const void *environment, tw_meaning meaning);
