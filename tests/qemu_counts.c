// A plugin of QEMU's user-mode emulator (plugin interface 1) that counts executed AArch64 instructions of given functions by class.
//
// Argument: functions=FILE with lines "START BYTES NAME" (hexadecimal). When the program ends, it writes a line
// "NAME total fma load store branch" for each function to the plugin log. Classes are read off the encoding
// (Arm Architecture Reference Manual, C4.1), so that they owe nothing to a disassembler.

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// The part of QEMU's plugin interface that is used here.
typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct information;
enum inline_operation { ADD_U64 };
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t index);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction);
extern uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *instruction);
extern void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*callback)(plugin_id, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *instruction, enum inline_operation, void *counter, uint64_t step);
extern void qemu_plugin_register_atexit_cb(plugin_id id, void (*callback)(plugin_id, void *), void *data);
extern void qemu_plugin_outs(const char *text);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum { FUNCTIONS = 256, TOTAL = 0, FMA, LOAD, STORE, BRANCH, CLASSES };
static struct {
    uint64_t start, bytes, counts[CLASSES];
    char name[200];
} functions[FUNCTIONS];
static int count;

static bool matches(uint32_t code, uint32_t mask, uint32_t value) { return (code & mask) == value; }

static bool is_fma(uint32_t code) {
    if (matches(code, 0xff000000, 0x1f000000)) return true;  // fmadd, fmsub, fnmadd, fnmsub
    if (matches(code, 0xbf20fc00, 0x0e20cc00)) return true;  // fmla, fmls: vectors
    const uint32_t element = code & 0xbf00f400;              // by element, 32 and 64 bits
    if (matches(code, 0x00800000, 0x00800000) && (element == 0x0f001000 || element == 0x0f005000)) return true;
    const uint32_t scalar = code & 0xff00f400;
    return matches(code, 0x00800000, 0x00800000) && (scalar == 0x5f001000 || scalar == 0x5f005000);
}

// LOAD, STORE, or 0
static int memory(uint32_t code) {
    if (!matches(code, 0x0a000000, 0x08000000)) return 0;
    const bool bit22 = code >> 22 & 1;
    switch (code >> 28 & 3) {
    case 0: return bit22 ? LOAD : STORE;  // structures, exclusive
    case 1: return matches(code, 0xff000000, 0xd8000000) ? 0 : LOAD;  // literal; not the prefetch
    case 2: return bit22 ? LOAD : STORE;  // pairs
    default:
        if (matches(code, 0xffc00000, 0xf9800000) || matches(code, 0xffe00c00, 0xf8a00800)) return 0;  // prefetch
        if (code >> 26 & 1) return bit22 ? LOAD : STORE;
        return code >> 22 & 3 ? LOAD : STORE;
    }
}

static void translated(plugin_id id, struct qemu_plugin_tb *block) {
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
        struct qemu_plugin_insn *const instruction = qemu_plugin_tb_get_insn(block, i);
        const uint64_t address = qemu_plugin_insn_vaddr(instruction);
        for (int f = 0; f < count; ++f) {
            if (address - functions[f].start >= functions[f].bytes) continue;
            uint32_t code;
            memcpy(&code, qemu_plugin_insn_data(instruction), sizeof code);
            const int access = memory(code);
            const bool branch = matches(code, 0x1c000000, 0x14000000) && !matches(code, 0xff000000, 0xd5000000);
            qemu_plugin_register_vcpu_insn_exec_inline(instruction, ADD_U64, &functions[f].counts[TOTAL], 1);
            if (is_fma(code)) qemu_plugin_register_vcpu_insn_exec_inline(instruction, ADD_U64, &functions[f].counts[FMA], 1);
            if (access) qemu_plugin_register_vcpu_insn_exec_inline(instruction, ADD_U64, &functions[f].counts[access], 1);
            if (branch) qemu_plugin_register_vcpu_insn_exec_inline(instruction, ADD_U64, &functions[f].counts[BRANCH], 1);
        }
    }
}

static void finished(plugin_id id, void *data) {
    (void)id, (void)data;
    for (int f = 0; f < count; ++f) {
        const uint64_t *const n = functions[f].counts;
        char line[400];
        snprintf(line, sizeof line, "%s %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", functions[f].name, n[TOTAL], n[FMA],
                 n[LOAD], n[STORE], n[BRANCH]);
        qemu_plugin_outs(line);
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const struct information *info, int argc, char **argv) {
    (void)info;
    if (argc != 1 || strncmp(argv[0], "functions=", 10)) return 1;
    FILE *const file = fopen(argv[0] + 10, "r");
    if (!file) return 1;
    while (count < FUNCTIONS && fscanf(file, "%" SCNx64 " %" SCNx64 " %199s", &functions[count].start, &functions[count].bytes, functions[count].name) == 3)
        ++count;
    fclose(file);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
