// AMX on a processor with AVX-512 but without AMX: a library to preload, whose handler of SIGILL executes the tile
// instructions.  Numbers are right, times say nothing.
//
// A signal takes microseconds.  So the handler replaces the first of several tile instructions in a row by a jump to
// code that executes all of them and goes on behind the last.
//
// oneDNN asks the processor by CPUID and XGETBV, which cannot be intercepted; AMX_SITES lists where it does so in
// libtorch_cpu ("c1f2a0,x1f2c8": c or x for the instruction, then its offset), and UD2 is written there.  Who reads
// /proc/cpuinfo finds the flags of AMX, and the system's permission to use it is granted.  AMX_COUNTS names a file of
// counters, one for each name of Counted, which all processes share.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <immintrin.h>
#include <link.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum Counted { LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, TDPBXXD, CPUID, XGETBV };
enum { KINDS = XGETBV + 1, SITES = 512, ROW = 64, ROWS = 16, TILES = 8, REPLACED = 8192, REGISTERS = 16, JUMP = 5 };

static uint64_t own_counts[KINDS], *counts = own_counts;
static struct Site { uint8_t *at; char kind; } sites[SITES];
static int site_count, is_patched;

// Bytes 16 to 31 of a configuration are the bytes of each tile's rows, in pairs; bytes 48 to 55 the rows.
static __thread struct {
    uint8_t config[64], tile[TILES][ROWS][ROW];
} state __attribute__((tls_model("initial-exec")));

static int row_bytes(int tile) { return state.config[16 + 2 * tile]; }
static int rows(int tile) { return state.config[48 + tile]; }
static void count(enum Counted which) { __atomic_fetch_add(&counts[which], 1, __ATOMIC_RELAXED); }

static void load(int tile, const uint8_t *from, uint64_t stride) {
    memset(state.tile[tile], 0, sizeof state.tile[tile]);
    for (int i = 0; i < rows(tile); i++) memcpy(state.tile[tile][i], from + i * stride, row_bytes(tile));
}

static void store(int tile, uint8_t *to, uint64_t stride) {
    for (int i = 0; i < rows(tile); i++) memcpy(to + i * stride, state.tile[tile][i], row_bytes(tile));
}

// Products of even and odd numbers are summed apart, with subnormals as zeros, as Intel's manual describes it.
static void multiply_bfloat16(int to, int a, int b) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // exceptions masked, subnormal operands and results are zeros
    for (int m = 0; m < rows(to); m++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < row_bytes(a) / 4; k++) {
            const __m512i x = _mm512_set1_epi32(((int32_t *)state.tile[a][m])[k]);
            const __m512i y = _mm512_loadu_si512(state.tile[b][k]), high = _mm512_set1_epi32(0xffff0000);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(y, high), odd);
        }
        float *sum = (float *)state.tile[to][m];
        const __mmask16 valid = (1u << row_bytes(to) / 4) - 1;
        _mm512_storeu_ps(sum, _mm512_maskz_add_ps(valid, _mm512_loadu_ps(sum), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(control);
}

// Bytes of which those of `a` are unsigned and those of `b` signed.
__attribute__((target("avx512vnni"))) static void multiply_mixed(int to, int a, int b) {
    const __mmask16 valid = (1u << row_bytes(to) / 4) - 1;
    for (int m = 0; m < rows(to); m++) {
        int32_t *sum = (int32_t *)state.tile[to][m];
        __m512i sums = _mm512_maskz_loadu_epi32(valid, sum);
        for (int k = 0; k < row_bytes(a) / 4; k++) {
            const __m512i x = _mm512_set1_epi32(((int32_t *)state.tile[a][m])[k]);
            sums = _mm512_dpbusd_epi32(sums, x, _mm512_loadu_si512(state.tile[b][k]));
        }
        _mm512_mask_storeu_epi32(sum, valid, sums);
    }
}

static void multiply_int8(int to, int a, int b, int a_is_signed, int b_is_signed) {
    if (!a_is_signed && b_is_signed) return multiply_mixed(to, a, b);
    for (int m = 0; m < rows(to); m++)
        for (int k = 0; k < row_bytes(a); k++) {
            const int x = a_is_signed ? (int8_t)state.tile[a][m][k] : state.tile[a][m][k];
            for (int n = 0; n < row_bytes(to) / 4; n++) {
                const uint8_t y = state.tile[b][k / 4][4 * n + k % 4];
                ((int32_t *)state.tile[to][m])[n] += x * (b_is_signed ? (int8_t)y : y);
            }
        }
}

// Execute the tile instruction `at`, which the program has at `place`; return its length, or 0 if it is none.
// Registers are in the order of the encoding: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
static int execute(const uint8_t *at, const uint8_t *place, const uint64_t *registers) {
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) return 0;  // VEX, map 0F38, W 0, 128 bits
    const int prefix = at[2] & 3, third = ~at[2] >> 3 & 15, opcode = at[3], mode = at[4] >> 6;  // 0 none, 66, F3, F2
    const int first = at[4] >> 3 & 7, second = at[4] & 7;
    if (mode == 3) {
        if (opcode == 0x49 && prefix == 0) {
            count(TILERELEASE);
            memset(&state, 0, sizeof state);
        } else if (opcode == 0x49 && prefix == 3) {
            count(TILEZERO);
            memset(state.tile[first], 0, sizeof state.tile[first]);
        } else if (opcode == 0x5c && prefix == 2) {
            count(TDPBF16PS);
            multiply_bfloat16(first, second, third);
        } else if (opcode == 0x5e) {
            count(TDPBXXD);
            multiply_int8(first, second, third, prefix >= 2, prefix & 1);  // uu, us, su, ss
        } else {
            return 0;
        }
        return 5;
    }
    if (opcode != 0x49 && opcode != 0x4b) return 0;
    int size = 5;
    uint64_t address = 0, index = 0;
    if (second == 4) {
        const int sib = at[size++], inner = (sib & 7) | (~at[1] >> 5 & 1) << 3;
        const int by = (sib >> 3 & 7) | (~at[1] >> 6 & 1) << 3;
        index = by == 4 ? 0 : registers[by] << (sib >> 6);
        if ((sib & 7) == 5 && mode == 0) size += 4, address = *(int32_t *)(at + size - 4);
        else address = registers[inner];
    } else if (second == 5 && mode == 0) {
        size += 4, address = (uint64_t)place + size + *(int32_t *)(at + size - 4);
    } else {
        address = registers[second | (~at[1] >> 5 & 1) << 3];
    }
    if (mode == 1) address += (int8_t)at[size++];
    if (mode == 2) size += 4, address += *(int32_t *)(at + size - 4);
    if (opcode == 0x4b) {
        count(prefix == 2 ? TILESTORED : TILELOADD);
        prefix == 2 ? store(first, (uint8_t *)address, index) : load(first, (uint8_t *)address, index);
    } else if (prefix == 0) {
        count(LDTILECFG);
        memset(&state, 0, sizeof state);
        memcpy(state.config, (uint8_t *)address + index, sizeof state.config);
    } else {
        count(STTILECFG);
        memcpy((uint8_t *)address + index, state.config, sizeof state.config);
    }
    return size;
}

// Answer CPUID or XGETBV as a processor with AMX does; oneDNN also asks for AVX512-FP16 and AVX-VNNI.
static int answer(greg_t *regs) {
    char kind = 0;
    for (int i = 0; i < site_count; i++)
        if (sites[i].at == (uint8_t *)regs[REG_RIP]) kind = sites[i].kind;
    if (!kind) return 0;
    uint32_t a = 0, b = 0, c = 0, d = 0, leaf = regs[REG_RAX], part = regs[REG_RCX];
    if (kind == 'x') {
        __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(part));
        regs[REG_RAX] = a | (part ? 0 : 3 << 17), regs[REG_RDX] = d;
        count(XGETBV);
        return 3;
    }
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 0 && a < 0x1e) a = 0x1e;
    if (leaf == 7 && part == 0) a = a ? a : 1, d |= 15 << 22;
    if (leaf == 7 && part == 1) a |= 1 << 4;
    if (leaf == 0x1d) a = part ? TILES * 1024 | 1024 << 16 : 1, b = part ? ROW | TILES << 16 : 0, c = part ? ROWS : 0;
    if (leaf == 0x1e) a = 0, b = ROWS | ROW << 8, c = d = 0;
    regs[REG_RAX] = a, regs[REG_RBX] = b, regs[REG_RCX] = c, regs[REG_RDX] = d;
    count(CPUID);
    return 2;
}

// Tile instructions in a row, as they were before a jump was written over the first.
static struct Replaced { const uint8_t *at; uint8_t code[256]; int size; } replaced[REPLACED];
static int replaced_count, is_replacing;

__attribute__((used)) static void execute_replaced(const struct Replaced *from, const uint64_t *registers) {
    for (int done = 0; done < from->size;) done += execute(from->code + done, from->at + done, registers);
}

// Called by the code of `replace`, with the instructions in rax, whose own value is on the stack: keep all registers.
void execute_and_keep(void);
__asm__("execute_and_keep: pushfq; cld\n"
        "push %r15; push %r14; push %r13; push %r12; push %r11; push %r10; push %r9; push %r8; push %rdi; push %rsi\n"
        "push %rbp; lea 368(%rsp), %rbp; push %rbp; push %rbx; push %rdx; push %rcx; push 136(%rsp)\n"
        "mov %rax, %rdi; mov %rsp, %rsi; mov %rsp, %rbx; sub $4096, %rsp; and $-64, %rsp; xor %ecx, %ecx\n"
        "0: movq $0, 512(%rsp,%rcx,8); inc %ecx; cmp $8, %ecx; jb 0b\n"
        "mov $0xe7, %eax; xor %edx, %edx; xsave64 (%rsp); call execute_replaced\n"
        "mov $0xe7, %eax; xor %edx, %edx; xrstor64 (%rsp); mov %rbx, %rsp\n"
        "pop %rax; pop %rcx; pop %rdx; pop %rbx; pop %rbp; pop %rbp; pop %rsi; pop %rdi\n"
        "pop %r8; pop %r9; pop %r10; pop %r11; pop %r12; pop %r13; pop %r14; pop %r15; popfq; ret\n");

// Memory for code that a jump from `at` reaches, or null.
static uint8_t *memory_near(const uint8_t *at, int size) {
    enum { PIECE = 1 << 16 };
    static uint8_t *next, *end;
    for (int i = 0; i < SITES; i++) {
        if (next && next + size <= end && labs(next - at) < 1l << 30) return (next += size) - size;
        uint8_t *const wanted = (uint8_t *)((uintptr_t)at & -(1l << 24)) - ((uintptr_t)i << 20);
        next = mmap(wanted, PIECE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (next == MAP_FAILED) return next = NULL;
        end = next + PIECE;
    }
    return NULL;
}

// Write code that other threads may be executing: first an illegal instruction, whose signal waits for the lock.
static void write_code(uint8_t *at, const uint8_t *code, int size) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    uint8_t *const start = (uint8_t *)((uintptr_t)at & -page);
    mprotect(start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC);
    __atomic_store_n((uint16_t *)at, 0x0b0f, __ATOMIC_SEQ_CST);
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
    memcpy(at + 2, code + 2, size - 2);
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
    __atomic_store_n((uint16_t *)at, code[0] | code[1] << 8, __ATOMIC_SEQ_CST);
}

// Jump to code that executes the tile instructions at `at`, of so many bytes, and goes on behind them.
static void replace(uint8_t *at, int size) {
    if (replaced_count == REPLACED || size > (int)sizeof replaced->code || ((uintptr_t)at & 63) == 63) return;
    uint8_t *const to = memory_near(at, 64);
    if (!to) return;
    struct Replaced *const from = &replaced[replaced_count++];
    *from = (struct Replaced){.at = at, .size = size};
    memcpy(from->code, at, size);
    // lea -256(%rsp), %rsp, as functions keep values below it; push %rax; mov $from, %rax; call *24(%rip); pop %rax;
    // lea 256(%rsp), %rsp; jmp behind the instructions
    uint8_t code[64] = "\x48\x8d\xa4\x24\0\xff\xff\xff\x50\x48\xb8........\xff\x15\x0e\0\0\0\x58"
                       "\x48\x8d\xa4\x24\0\1\0\0\xe9";
    void (*const call)(void) = execute_and_keep;
    memcpy(code + 11, &from, 8);
    *(int32_t *)(code + 35) = at + size - (to + 39);
    memcpy(code + 39, &call, 8);
    memcpy(to, code, sizeof code);
    uint8_t jump[JUMP] = {0xe9};
    *(int32_t *)(jump + 1) = to - (at + JUMP);
    write_code(at, jump, JUMP);
}

static void on_illegal(int signal_number, siginfo_t *info, void *data) {
    static const int by_number[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI};
    greg_t *regs = ((ucontext_t *)data)->uc_mcontext.gregs;
    uint8_t *const at = (uint8_t *)regs[REG_RIP];
    uint64_t registers[REGISTERS];
    for (int i = 0; i < REGISTERS; i++) registers[i] = regs[i < 8 ? by_number[i] : REG_R8 + i - 8];
    while (__atomic_exchange_n(&is_replacing, 1, __ATOMIC_ACQUIRE)) sched_yield();
    int done = answer(regs);
    if (!done) {
        for (int size; (size = execute(at + done, at + done, registers));) done += size;
        if (done) replace(at, done);
    }
    const int is_jump = at[0] == 0xe9;  // by now, or since another thread has written it
    __atomic_store_n(&is_replacing, 0, __ATOMIC_RELEASE);
    regs[REG_RIP] += done;
    if (done || is_jump) return;
    fprintf(stderr, "not emulated:");
    for (int i = 0; i < 8; i++) fprintf(stderr, " %02x", at[i]);
    fprintf(stderr, "\n");
    signal(signal_number, SIG_DFL);  // the instruction ends the process when it is run again
}

// Write UD2 where libtorch_cpu asks the processor.
static int patch(struct dl_phdr_info *info, size_t size, void *unused) {
    if (!strstr(info->dlpi_name, "libtorch_cpu.so")) return 0;
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (const char *left = getenv("AMX_SITES"); left && *left && site_count < SITES; left += strcspn(left, ",") + 1) {
        uint8_t *at = (uint8_t *)info->dlpi_addr + strtoul(left + 1, NULL, 16);
        if (memcmp(at, *left == 'x' ? "\x0f\x01\xd0" : "\x0f\xa2", *left == 'x' ? 3 : 2)) abort();  // another torch
        sites[site_count++] = (struct Site){at, *left};
        uint8_t *start = (uint8_t *)((uintptr_t)at & -page);
        mprotect(start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC);
        memcpy(at, "\x0f\x0b", 2);
        mprotect(start, 2 * page, PROT_READ | PROT_EXEC);
        if (!left[strcspn(left, ",")]) break;
    }
    return is_patched = 1;
}

void *dlopen(const char *name, int flags) {
    static void *(*next)(const char *, int);
    if (!next) next = dlsym(RTLD_NEXT, "dlopen");
    void *found = next(name, flags);
    if (!is_patched) dl_iterate_phdr(patch, NULL);
    return found;
}

long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = dlsym(RTLD_NEXT, "syscall");
    long of[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) of[i] = va_arg(list, long);
    va_end(list);
    const int about_amx = number == SYS_arch_prctl && of[0] >= 0x1021 && of[0] <= 0x1023;
    if (!about_amx) return next(number, of[0], of[1], of[2], of[3], of[4], of[5]);
    if (of[0] != 0x1023) *(uint64_t *)of[1] = 3 << 17;  // ARCH_GET_XCOMP_SUPP, ARCH_GET_XCOMP_PERM
    return 0;                                           // ARCH_REQ_XCOMP_PERM
}

// A copy of /proc/cpuinfo whose processors have AMX.
static int open_cpuinfo(void) {
    FILE *from = fopen("/proc/cpuinfo", "r"), *to = fdopen(memfd_create("cpuinfo", 0), "w+");
    char line[8192];
    while (fgets(line, sizeof line, from)) {
        if (!strncmp(line, "flags", 5)) strcpy(strchr(line, '\n'), " amx_tile amx_bf16 amx_int8\n");
        fputs(line, to);
    }
    fclose(from);
    fflush(to);
    const int copy = dup(fileno(to));
    fclose(to);
    lseek(copy, 0, SEEK_SET);
    return copy;
}

int open64(const char *path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    if (!next) next = dlsym(RTLD_NEXT, "open64");
    va_list list;
    va_start(list, flags);
    const int mode = va_arg(list, int);
    va_end(list);
    return strcmp(path, "/proc/cpuinfo") ? next(path, flags, mode) : open_cpuinfo();
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("AMX_COUNTS");
    const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) counts = mmap(NULL, sizeof own_counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counts == MAP_FAILED) abort();
    syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
    sigaction(SIGILL, &(struct sigaction){.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER}, NULL);
}
