/* A wall clock that tests can move, for one process: preloaded, it shifts CLOCK_REALTIME by the seconds that
 * the file KAFKA_CLOCK holds (8 bytes, a native signed integer, which may change at any time). No other clock is
 * touched: timers run on. libfaketime does more, and Kafka does not start under it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void open_clock(void) {
    const char *name = getenv("KAFKA_CLOCK");
    int file = name ? open(name, O_RDONLY) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        perror("clock: KAFKA_CLOCK");
        _exit(1);
    }
    close(file);
    shift_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
