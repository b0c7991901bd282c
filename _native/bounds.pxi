"""Checks of writes through pointers, in the debug and the sanitizer build.

The release build compiles them to nothing. A memoryview checks its indices by itself there.
"""

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>

    #define TRAJKIT_CHECKED (TRAJKIT_BUILD[0] != 'r') /* a constant: "release", or not */

    /* Abort unless n entries from start on lie within a buffer of size entries. */
    static inline void trajkit_check_write(
        const char *buffer, int64_t start, int64_t n, int64_t size
    ) {
        if (!TRAJKIT_CHECKED || n <= 0 || (start >= 0 && start <= size - n))
            return;
        fprintf(
            stderr, "trajkit: a write of %lld entries at %lld does not fit %s, which has %lld\\n",
            (long long)n, (long long)start, buffer, (long long)size
        );
        abort();
    }
    """
    const bint TRAJKIT_CHECKED
    void check_write "trajkit_check_write" (
        const char* buffer, int64_t start, int64_t n, int64_t size
    ) noexcept nogil


cdef _check_forest(const Node[::1] nodes, const int32_t[::1] ends):
    """Raise unless every node number in a forest is one, in the builds that check writes.

    Kernels index their scratch by these numbers.
    """
    cdef int64_t i, n = nodes.shape[0]
    if not TRAJKIT_CHECKED:
        return
    for i in range(ends.shape[0]):
        if not 0 <= ends[i] < n:
            raise LayoutError(f"ends[{i}] is {ends[i]}: there are {n} nodes")
    for i in range(n):
        if not (-1 <= nodes[i].parent < n and nodes[i].start <= nodes[i].stop):
            raise LayoutError(f"nodes[{i}] is {nodes[i]}: there are {n} nodes")
