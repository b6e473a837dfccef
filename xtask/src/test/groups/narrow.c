/* A program whose off_t has 32 bits lists and seeks a directory of the names n-0, n-1, … n-(COUNT-1).
 * narrow DIRECTORY COUNT SEEKS. Says what is wrong in one line and exits with 1. Built with gcc -m32. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 4 && sizeof(long) == 4, "built with -m32 and without large offsets");

/* What one seek may repeat: the names of a few neighbours. */
#define REPEATED 8

static long count, entries;
static long seeks;
/* Of the nth entry: its name's number (beyond `count` for . and ..), the offset behind it. */
static long *ids, *tells;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    exit(1);
}

static long id_of(const char *name) {
    if (strcmp(name, ".") == 0) return count;
    if (strcmp(name, "..") == 0) return count + 1;
    if (strncmp(name, "n-", 2) != 0) fail("unknown name %s", name);
    return atol(name + 2);
}

/* -1 at the end. */
static long next(DIR *dir) {
    errno = 0;
    struct dirent *entry = readdir(dir);
    if (entry == NULL && errno != 0) fail("readdir: %s", errno == EOVERFLOW ? "EOVERFLOW" : strerror(errno));
    return entry == NULL ? -1 : id_of(entry->d_name);
}

static DIR *open_here(void) {
    DIR *dir = opendir(".");
    if (dir == NULL) fail("opendir: %s", strerror(errno));
    return dir;
}

static void list(DIR *dir) {
    char *seen = calloc(count + 2, 1);
    for (long id; (id = next(dir)) != -1; entries++) {
        if (id >= count + 2 || seen[id]++) fail("%ld came twice, or is none of ours", id);
        ids[entries] = id;
        tells[entries] = telldir(dir);
        if (tells[entries] < 1 || tells[entries] == INT_MAX) fail("an offset of %ld", tells[entries]);
    }
    if (entries != count + 2) fail("%ld of %ld entries", entries, count + 2);
    free(seen);
}

static long any(void) {
    return (long)(((unsigned)rand() << 12 ^ (unsigned)rand()) % (unsigned)(entries - 1));
}

static void seek_to(DIR *dir, long nth) {
    seekdir(dir, tells[nth]);
    long id = next(dir);
    if (id != ids[nth + 1]) fail("behind entry %ld (offset %ld) is %ld, not %ld", nth, tells[nth], id, ids[nth + 1]);
}

/* Each where two offsets lie as near as only those do that had to give way to each other, and as many others. */
static long seek_near(DIR *dir) {
    long near = 0;
    for (long nth = 3; nth + 1 < entries && near < seeks; nth++) {
        if (labs(tells[nth] - tells[nth - 1]) > 64) continue;
        near++;
        seek_to(dir, nth - 1);
        seek_to(dir, nth);
    }
    return near;
}

struct old_dirent {
    unsigned long ino, off;
    unsigned short length;
    char name[];
};

/* With a buffer that holds one entry: the longest has 24 bytes, and two of the shortest have 32. */
static void read_singly(int fd, long from) {
    char buffer[28] __attribute__((aligned(8)));
    if (lseek(fd, tells[from], SEEK_SET) != tells[from]) fail("lseek: %s", strerror(errno));
    for (long nth = from + 1; nth < entries && nth < from + seeks; nth++) {
        long got = syscall(SYS_getdents, fd, buffer, sizeof buffer);
        struct old_dirent *entry = (struct old_dirent *)buffer;
        if (got <= 0 || got != entry->length) fail("getdents: %ld, %s", got, strerror(errno));
        if (id_of(entry->name) != ids[nth]) fail("singly, entry %ld is %s, not n-%ld", nth, entry->name, ids[nth]);
    }
}

/* An entry goes after its offset was told, or another comes; what follows is still there. */
static void seek_after_changes(DIR *dir) {
    char name[32];
    for (long change = 0; change < seeks / 10; change++) {
        long nth = any();
        if (ids[nth] < 0 || ids[nth] >= count || ids[nth + 1] < 0) continue;
        if (change % 2 == 0) {
            snprintf(name, sizeof name, "n-%ld", ids[nth]);
            if (unlink(name) != 0) fail("unlink: %s", strerror(errno));
            ids[nth] = -1;
        } else {
            snprintf(name, sizeof name, "n-%ld", count + 2 + change);
            int fd = open(name, O_CREAT | O_WRONLY, 0644);
            if (fd < 0 || close(fd) != 0) fail("open: %s", strerror(errno));
        }
        seekdir(dir, tells[nth]);
        int read = 0;
        while (next(dir) != ids[nth + 1])
            if (++read > REPEATED) fail("a seek to %ld skipped %ld", tells[nth], ids[nth + 1]);
    }
}

int main(int argc, char **argv) {
    if (argc != 4 || chdir(argv[1]) != 0) fail("narrow DIRECTORY COUNT SEEKS");
    count = atol(argv[2]);
    seeks = atol(argv[3]);
    ids = calloc(count + 2, sizeof *ids);
    tells = calloc(count + 2, sizeof *tells);
    DIR *dir = open_here(), *other = open_here();
    list(dir);
    for (int n = 0; n < seeks; n++) seek_to(dir, any());
    long near = seek_near(other);
    read_singly(dirfd(other), any());
    read_singly(dirfd(other), 0);
    seek_after_changes(dir);
    seek_after_changes(other);
    printf("%ld entries, %ld near each other\n", entries, near);
    return 0;
}
