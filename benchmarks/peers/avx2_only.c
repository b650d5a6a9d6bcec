/* Makes a process believe that its processor has AVX2 and nothing newer: LD_PRELOAD=avx2_only.so COMMAND.

   The CPUID instruction faults (ARCH_SET_CPUID; Linux on Intel processors with "cpuid_fault" in /proc/cpuinfo)
   and is answered here without AVX-512, AMX and AVX-VNNI. So every library takes the code that it has for such a
   processor. libc has chosen its own string functions before. New threads and forks inherit the fault; a process
   that is executed loads this again. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static struct sigaction theirs = {.sa_handler = SIG_DFL};
static int (*set_action)(int, const struct sigaction *, struct sigaction *);
static int (*set_mask)(int, const sigset_t *, sigset_t *);

static void answer(greg_t *registers) {
    unsigned leaf = (unsigned)registers[REG_RAX], sub = (unsigned)registers[REG_RCX], a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, sub, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && sub == 0) {
        b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31)); /* AVX-512 */
        c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));                                 /* and its bytes */
        d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));              /* FP16, AMX */
    } else if (leaf == 7 && sub == 1) {
        a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));        /* AVX-VNNI, bfloat16, AMX, AVX-IFMA */
        d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19)); /* more of AVX-VNNI, AMX, AVX10 */
    } else if (leaf == 0xd && sub == 0) {
        a &= ~(BIT(5) | BIT(6) | BIT(7) | BIT(17) | BIT(18)); /* the state of AVX-512 and AMX */
    } else if (leaf >= 0x1d && leaf <= 0x24) {
        a = b = c = d = 0; /* tiles, AVX10 */
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

static void on_fault(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_code == SI_KERNEL) {
        const unsigned char *code = (const unsigned char *)registers[REG_RIP];
        if (code[0] == 0x0f && code[1] == 0xa2) {
            answer(registers);
            return;
        }
    }
    if (theirs.sa_flags & SA_SIGINFO) {
        theirs.sa_sigaction(signal_number, info, context);
    } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
        theirs.sa_handler(signal_number);
    } else { /* faults again, now without a handler */
        set_action(SIGSEGV, &theirs, NULL);
    }
}

__attribute__((constructor(101))) static void start(void) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    set_action = dlsym(RTLD_NEXT, "sigaction");
    set_mask = dlsym(RTLD_NEXT, "pthread_sigmask");
    if (set_action(SIGSEGV, &ours, NULL) || syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        perror("avx2_only: this kernel or processor cannot let CPUID fault");
        _exit(70);
    }
}

/* The handler stays in place, and no thread blocks its signal. */

int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (number != SIGSEGV || !set_action) {
        int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
        return next(number, new, old);
    }
    struct sigaction before = theirs;
    if (new) theirs = *new;
    if (old) *old = before;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction new = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return sigaction(number, &new, &old) ? SIG_ERR : old.sa_handler;
}

int pthread_sigmask(int change, const sigset_t *set, sigset_t *old) {
    sigset_t allowed;
    if (!set_mask) set_mask = dlsym(RTLD_NEXT, "pthread_sigmask");
    if (set && change != SIG_UNBLOCK) {
        allowed = *set;
        sigdelset(&allowed, SIGSEGV);
        set = &allowed;
    }
    return set_mask(change, set, old);
}

int sigprocmask(int change, const sigset_t *set, sigset_t *old) {
    int failed = pthread_sigmask(change, set, old);
    if (failed) errno = failed;
    return failed ? -1 : 0;
}
