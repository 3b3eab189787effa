/* The inner loop of the fingerprint in C: weighted sums of words modulo p = 2^61 - 1.

   The same sums that kernels.py computes with numba, which serves where this was not built; the tests hold the two together.
   Plain C without Python's headers, called through ctypes, so without the GIL. docs/design/005 says why there are two. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX512 1
#endif

#define P ((UINT64_C(1) << 61) - 1)
#define DIGIT_BITS 12
#define DIGIT (INT64_C(1) << DIGIT_BITS)
#define MAX_RUN 8192 /* words: a product of a word and half a residue is below 2^48, so that many stay below 2^61 */
#define ROWS 4       /* runs that are read together when they lie alike on the table */

/* Weights of a box; fingerprint/tensors.py Prepared says what each is. Arrays are C-contiguous. */
struct weights {
    int64_t word_bytes, per_step, line_steps, step_offset, dims, table_columns, weight_columns, high_columns;
    const uint32_t *table;  /* 4 rows, table_columns apart */
    const uint64_t *high;   /* (2, high_columns) */
    const uint64_t *weight; /* (2, weight_columns) */
    const int64_t *sizes, *starts;
};

struct run {
    int64_t begin, steps, digit, line; /* begin and steps in steps, begin counted from the first word given */
};

static inline uint64_t reduce(uint64_t x) {
    x = (x & P) + (x >> 61);
    return x >= P ? x - P : x;
}

static inline uint64_t mulmod(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return reduce((uint64_t)(product & P) + (uint64_t)(product >> 61));
}

static inline uint64_t load_word(const uint8_t *at, int64_t word_bytes) {
    return word_bytes == 1 ? at[0] : (uint64_t)at[0] | (uint64_t)at[1] << 8; /* little-endian, at any address */
}

/* Dot products of rows of n words with the four table rows, from word `from` on, added to out. Any CPU. */
static void dots_plain(const uint8_t *const *rows, int count, int64_t from, int64_t n, int64_t word_bytes,
                       const uint32_t *const *t, uint64_t (*out)[4]) {
    for (int r = 0; r < count; r++) {
        uint64_t a = 0, b = 0, c = 0, d = 0;
        for (int64_t i = from; i < n; i++) {
            uint64_t w = load_word(rows[r] + i * word_bytes, word_bytes);
            a += w * t[0][i];
            b += w * t[1][i];
            c += w * t[2][i];
            d += w * t[3][i];
        }
        out[r][0] += a;
        out[r][1] += b;
        out[r][2] += c;
        out[r][3] += d;
    }
}

#ifdef HAVE_AVX512
/* vpmuludq multiplies the low halves of 64-bit lanes and ignores the high ones: sixteen 32-bit table entries serve as they
   are for the even words, and shifted by 32 for the odd ones. */
#define TAKE(ROW)                                                                                                              \
    __m512i even##ROW = word_bytes == 2                                                                                        \
                            ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(rows[ROW] + 2 * i)))                     \
                            : _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(rows[ROW] + i)));                            \
    __m512i odd##ROW = _mm512_srli_epi64(even##ROW, 32);
#define ADD(ROW)                                                                                                               \
    sum[ROW][k] = _mm512_add_epi64(sum[ROW][k], _mm512_add_epi64(_mm512_mul_epu32(even##ROW, x),                               \
                                                                 _mm512_mul_epu32(odd##ROW, y)));

__attribute__((target("avx512f,avx512bw"))) static inline __attribute__((always_inline)) int64_t
dots_avx512(const uint8_t *const *rows, const int count, int64_t n, const int64_t word_bytes, const uint32_t *const *t,
            uint64_t (*out)[4]) {
    __m512i sum[ROWS][4];
    for (int r = 0; r < count; r++)
        for (int k = 0; k < 4; k++) sum[r][k] = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        TAKE(0)
        if (count == 1) {
            for (int k = 0; k < 4; k++) {
                __m512i x = _mm512_loadu_si512(t[k] + i), y = _mm512_srli_epi64(x, 32);
                ADD(0)
            }
        } else {
            TAKE(1) TAKE(2) TAKE(3)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                __m512i x = _mm512_loadu_si512(t[k] + i), y = _mm512_srli_epi64(x, 32);
                ADD(0) ADD(1) ADD(2) ADD(3)
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int k = 0; k < 4; k++) out[r][k] += (uint64_t)_mm512_reduce_add_epi64(sum[r][k]);
    return i;
}

#define DOTS_AVX512(NAME, COUNT, BYTES)                                                                                        \
    __attribute__((target("avx512f,avx512bw"))) static int64_t NAME(const uint8_t *const *rows, int64_t n,                     \
                                                                    const uint32_t *const *t, uint64_t (*out)[4]) {            \
        return dots_avx512(rows, COUNT, n, BYTES, t, out);                                                                     \
    }
DOTS_AVX512(one_row_16, 1, 2)
DOTS_AVX512(four_rows_16, ROWS, 2)
DOTS_AVX512(one_row_8, 1, 1)
DOTS_AVX512(four_rows_8, ROWS, 1)

static int wide_vectors(void) {
    static int known = -1; /* the same value whichever thread writes it */
    if (known < 0) known = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    return known;
}
#endif

static void dots(const uint8_t *const *rows, int count, int64_t n, int64_t word_bytes, const uint32_t *const *t,
                 uint64_t (*out)[4]) {
    memset(out, 0, sizeof(uint64_t[ROWS][4]));
#ifdef HAVE_AVX512
    if (wide_vectors()) {
        int64_t done = 0;
        if (count == ROWS)
            done = word_bytes == 2 ? four_rows_16(rows, n, t, out) : four_rows_8(rows, n, t, out);
        else
            for (int r = 0; r < count; r++)
                done = word_bytes == 2 ? one_row_16(rows + r, n, t, out + r) : one_row_8(rows + r, n, t, out + r);
        dots_plain(rows, count, done, n, word_bytes, t, out);
        return;
    }
#endif
    dots_plain(rows, count, 0, n, word_bytes, t, out);
}

/* Where the next run of steps lies: it ends with the line, with the 4096 values of the lowest digit, or at MAX_RUN words. */
static struct run next_run(const struct weights *w, int64_t first, int64_t done, int64_t total) {
    int64_t at = first + done, line = at / w->line_steps, inside = at - line * w->line_steps;
    int64_t digit = (w->step_offset + inside) & (DIGIT - 1);
    int64_t limit = MAX_RUN / w->per_step, steps = total - done;
    if (limit < 1) limit = 1;
    if (steps > w->line_steps - inside) steps = w->line_steps - inside;
    if (steps > DIGIT - digit) steps = DIGIT - digit;
    if (steps > limit) steps = limit;
    return (struct run){done, steps, digit, line};
}

/* Product of the weights of the earlier dims' indices. */
static uint64_t line_weight(const struct weights *w, int64_t line, int lane) {
    uint64_t product = 1;
    for (int64_t dim = w->dims - 1; dim >= 0; dim--) {
        product = mulmod(product, w->weight[lane * w->weight_columns + w->starts[dim] + line % w->sizes[dim]]);
        line /= w->sizes[dim];
    }
    return product;
}

/* Adds the weighted sum of a range of a box to sums[2]. words: whole steps; first: number of the first step in the box. */
void ckptguard_accumulate(const struct weights *w, const uint8_t *words, int64_t count_words, int64_t first, uint64_t *sums) {
    const int64_t total = count_words / w->per_step, step_bytes = w->per_step * w->word_bytes;
    int64_t done = 0, line = -1;
    uint64_t by_line[2] = {1, 1};
    while (done < total) {
        struct run runs[ROWS] = {{0}};
        const uint8_t *rows[ROWS];
        const uint32_t *t[4];
        uint64_t out[ROWS][4];
        int count = 0;
        for (int64_t ahead = done; count < ROWS && ahead < total; count++) {
            struct run next = next_run(w, first, ahead, total);
            if (count && (next.digit != runs[0].digit || next.steps != runs[0].steps)) break;
            runs[count] = next;
            rows[count] = words + ahead * step_bytes;
            ahead += next.steps;
        }
        for (int k = 0; k < 4; k++) t[k] = w->table + k * w->table_columns + runs[0].digit * w->per_step;
        dots(rows, count, runs[0].steps * w->per_step, w->word_bytes, t, out);
        for (int r = 0; r < count; r++) {
            if (runs[r].line != line) {
                line = runs[r].line;
                by_line[0] = line_weight(w, line, 0);
                by_line[1] = line_weight(w, line, 1);
            }
            int64_t index = w->step_offset + first + runs[r].begin - line * w->line_steps;
            int64_t place = (index >> DIGIT_BITS) - (w->step_offset >> DIGIT_BITS);
            for (int lane = 0; lane < 2; lane++) {
                uint64_t low = reduce(out[r][2 * lane]), high = reduce(out[r][2 * lane + 1]);
                uint64_t value = reduce(low + mulmod(high, UINT64_C(1) << 32));
                value = mulmod(mulmod(value, w->high[lane * w->high_columns + place]), by_line[lane]);
                sums[lane] = reduce(sums[lane] + value);
            }
        }
        done = runs[count - 1].begin + runs[count - 1].steps;
    }
}

/* The same for count_words words of a file from offset_bytes on, read through the buffer.
   Returns 0, -errno, or 1 if the file ends too early; sums are then of no use. */
int64_t ckptguard_accumulate_file(const struct weights *w, int fd, int64_t offset_bytes, int64_t count_words, int64_t first,
                                  uint8_t *buffer, int64_t buffer_bytes, uint64_t *sums) {
    const int64_t step_bytes = w->per_step * w->word_bytes, total = count_words / w->per_step;
    const int64_t steps_per_read = buffer_bytes / step_bytes;
    for (int64_t done = 0; done < total;) {
        int64_t steps = total - done < steps_per_read ? total - done : steps_per_read, have = 0;
        while (have < steps * step_bytes) {
            ssize_t got = pread(fd, buffer + have, (size_t)(steps * step_bytes - have), offset_bytes + done * step_bytes + have);
            if (got == 0) return 1;
            if (got < 0 && errno != EINTR) return -errno;
            if (got > 0) have += got;
        }
        ckptguard_accumulate(w, buffer, steps * w->per_step, first + done, sums);
        done += steps;
    }
    return 0;
}
