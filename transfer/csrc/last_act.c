/* The last thing a process does: whatever happens in it, the process ends in time and with the status it was to have.
   See transfer/last_act.py. */

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static volatile int exit_status;
static uint32_t patience_ms;

static void end(const char *line)
{
    if (write(STDERR_FILENO, line, strlen(line)) < 0) {
        /* nobody is left to be told */
    }
    _exit(exit_status);
}

static void crashed(int signal_number)
{
    (void)signal_number;
    end("the last act of this process crashed; all its work was done before\n");
}

static void *watch(void *unused)
{
    (void)unused;
    struct timespec left = {patience_ms / 1000, (long)(patience_ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0)
        ;
    end("the last act of this process took too long and was given up; all its work was done before\n");
    return NULL;
}

int sluice_last_act(uint32_t milliseconds, int status)
{
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = crashed;
    exit_status = status;
    patience_ms = milliseconds;
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++)
        sigaction(fatal[i], &action, NULL);
    pthread_t thread;
    return pthread_create(&thread, NULL, watch, NULL);
}
