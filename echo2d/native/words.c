/* The loops of the delta codec in C: find the words of a chunk that changed, code them, and apply
 * them to a base. `core/weights` defines the formats, and has the same code in numpy, which gives the
 * same bytes and refuses the same payloads.
 *
 * Nothing here trusts a payload: every read from a payload is checked against its end, and every write
 * against the chunk's end. A function that decodes returns None, or why the payload is wrong.
 * The loops run without the GIL. They come in three levels, which `kernels.h` compiles one by one.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian; numpy serves other machines"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

#define BLOCK 64         /* words that a mask of 64 bits describes */
#define TABLE 64         /* blocks that are handled together; their tables fit into the nearest cache */
#define AHEAD (2 * BLOCK * TABLE) /* fetching is this many bytes ahead of reading */
#define GOES_ON 255      /* byte of a column: the value continues elsewhere */
#define ESCAPED 3        /* the code of a difference that is not -1, 0 or 1 */
#define CLASSES 16       /* classes of the base words, by magnitude */
#define LOWEST 110       /* the bits 7 to 14 of the largest words of class 0; bf16: below 2^-16 */
#define RICE_BLOCK 128   /* values that share a parameter */
#define RICE_MAX 15      /* the largest parameter */
#define SPLIT_HEAD (4 * (CLASSES + 1))
#define WORDS_MAX ((size_t)1 << 30) /* words of a chunk, so that 32 bits count them */
#define NEVER ((uint64_t)1 << 62) /* the rank of a class that has no more changes */

/* --- unaligned access */

static inline uint16_t get16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void put16(uint8_t *at, uint16_t value) { memcpy(at, &value, sizeof value); }

static inline uint32_t get32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void put32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }

static inline uint64_t get64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint16_t word_at(const uint8_t *chunk, size_t place) {
    return get16(chunk + 2 * place);
}

static inline void add_at(uint8_t *chunk, size_t place, uint16_t difference) {
    put16(chunk + 2 * place, (uint16_t)(word_at(chunk, place) + difference));
}

/* The number of the lowest 1 bit; bit 0 is the lowest. The mask must not be 0. */
static inline unsigned lowest_bit(uint64_t mask) {
#if defined(__GNUC__)
    return (unsigned)__builtin_ctzll(mask);
#else
    unsigned bit = 0;
    while (!(mask >> bit & 1)) bit++;
    return bit;
#endif
}

static inline unsigned class_of(uint16_t word) {
    unsigned high = word >> 7 & 255;
    unsigned above = high > LOWEST ? high - LOWEST : 0;
    return above < CLASSES - 1 ? above : CLASSES - 1;
}

/* Ask for the cache line AHEAD bytes further on. It need not exist, because nothing is read. */
static inline void fetch_ahead(const uint8_t *at) {
#if defined(__GNUC__)
    __builtin_prefetch((const void *)((uintptr_t)at + AHEAD));
#else
    (void)at;
#endif
}

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* --- the changes of a chunk */

struct changes {
    size_t limit, count; /* there is room for limit + TABLE * BLOCK */
    uint32_t *places;
    uint16_t *differences;
    /* With a split: the class of each word, and the unchanged words of that class before it. */
    uint8_t *classes;
    uint32_t *class_gaps;
    uint32_t next[CLASSES]; /* during the search: for each class, the first word after its last change */
};

/* --- the classes of the base */

struct table {
    uint64_t masks[TABLE][CLASSES]; /* the words of each class in a block */
    uint64_t seen[TABLE][CLASSES];  /* the words of each class before that block */
    uint64_t total[CLASSES];        /* the words of each class before the next table */
};

/* The next change of a class. */
struct cursor {
    uint64_t rank; /* how many words of the class come before it; NEVER: there is none */
    const uint16_t *difference;
    const uint32_t *gap, *end;
};

static inline struct cursor first_change(const uint32_t *gaps, const uint16_t *differences,
                                         size_t count) {
    return (struct cursor){count ? *gaps : NEVER, differences, gaps, gaps + count};
}

static inline void next_change(struct cursor *at) {
    at->gap++;
    at->difference++;
    at->rank = at->gap < at->end ? at->rank + 1 + *at->gap : NEVER;
}

/* --- the three levels */

#define JOIN_(name, level) name##_##level
#define JOIN(name, level) JOIN_(name, level)
#define NAME(name) JOIN(name, LEVEL)

#define LEVEL plain
#define TARGET
#include "kernels.h"
#undef LEVEL
#undef TARGET

#if HAS_X86
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define IS_AVX2
#include "kernels.h"
#undef IS_AVX2
#undef LEVEL
#undef TARGET

#define LEVEL avx512
#define TARGET                                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vpopcntdq,gfni," \
                          "avx2,bmi,bmi2,popcnt,lzcnt")))
#define IS_AVX512
#include "kernels.h"
#undef IS_AVX512
#undef LEVEL
#undef TARGET
#endif

enum { PLAIN, AVX2, AVX512 };

/* AVX-512 as in Ice Lake and Zen 4; older CPUs, which have less of it, use AVX2 here. */
static int best_level(void) {
#if HAS_X86
    __builtin_cpu_init();
    bool bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                __builtin_cpu_supports("popcnt");
    if (bits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vpopcntdq") &&
        __builtin_cpu_supports("gfni"))
        return AVX512;
    if (bits && __builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PLAIN;
}

#if HAS_X86
#define AT_LEVEL(level, name, ...)                                                              \
    ((level) == AVX512 ? name##_avx512(__VA_ARGS__)                                             \
     : (level) == AVX2 ? name##_avx2(__VA_ARGS__)                                               \
                       : name##_plain(__VA_ARGS__))
#else
#define AT_LEVEL(level, name, ...) ((void)(level), name##_plain(__VA_ARGS__))
#endif

/* --- columns of a sparse chunk */

/* z = 2 * d if the difference d is positive, else -2 * d - 1. */
static inline uint16_t zigzag(uint16_t difference) {
    return (uint16_t)(difference << 1 ^ -(difference >> 15));
}

static inline uint16_t unzigzag(uint16_t value) {
    return (uint16_t)(value >> 1 ^ -(value & 1));
}

static inline unsigned code_of(uint16_t difference) {
    uint16_t code = (uint16_t)(difference + 1);
    return code < ESCAPED ? code : ESCAPED;
}

/* Columns, with room for all that the changes can take; the ends are where the next write goes. */
struct columns_made {
    uint8_t *gaps, *codes, *small, *large;
    uint8_t *gaps_end, *codes_end, *small_end, *large_end;
};

/* Write what follows a code 3, and return where the columns go on. If not `escaped`, the same is written
 * but does not count, because a branch that the CPU cannot predict would take longer. */
static inline void write_escaped(uint16_t difference, bool escaped, uint8_t **small,
                                 uint8_t **large) {
    uint16_t value = zigzag(difference);
    **small = value < GOES_ON ? (uint8_t)value : GOES_ON;
    put16(*large, value);
    *small += escaped;
    *large += escaped && value >= GOES_ON ? 2 : 0;
}

static void write_columns(const struct changes *found, struct columns_made *out) {
    uint8_t *gaps = out->gaps, *codes = out->codes, *small = out->small, *large = out->large;
    const uint32_t *places = found->places;
    const uint16_t *differences = found->differences;
    size_t count = found->count;
    uint32_t next = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t gap = places[i] - next;
        for (; gap >= GOES_ON; gap -= GOES_ON) *gaps++ = GOES_ON;
        *gaps++ = (uint8_t)gap;
        next = places[i] + 1;
    }
    for (size_t start = 0; start < count; start += 4) {
        unsigned four = 0;
        for (size_t i = start; i < min_size(start + 4, count); i++) {
            unsigned code = code_of(differences[i]);
            four |= code << 2 * (i - start);
            write_escaped(differences[i], code == ESCAPED, &small, &large);
        }
        *codes++ = (uint8_t)four;
    }
    out->gaps_end = gaps;
    out->codes_end = out->codes + (found->count + 3) / 4;
    out->small_end = small;
    out->large_end = large;
}

/* --- dense chunks */

static void write_dense(const uint8_t *new, const uint8_t *base, size_t words,
                        struct columns_made *out) {
    uint8_t *codes = out->codes, *small = out->small, *large = out->large;
    for (size_t start = 0; start < words; start += 4) {
        unsigned four = 0;
        for (size_t i = start; i < min_size(start + 4, words); i++) {
            uint16_t difference = (uint16_t)(word_at(new, i) - word_at(base, i));
            unsigned code = code_of(difference);
            four |= code << 2 * (i - start);
            write_escaped(difference, code == ESCAPED, &small, &large);
        }
        *codes++ = (uint8_t)four;
    }
    out->codes_end = out->codes + (words + 3) / 4;
    out->small_end = small;
    out->large_end = large;
}

/* --- reading columns */

struct columns {
    const uint8_t *codes, *small, *small_end, *large, *large_end;
};

/* Add the difference with this number to the word. False: the columns of escaped differences are too short. */
static inline bool apply_code(struct columns *from, size_t number, uint8_t *chunk, size_t place) {
    unsigned code = from->codes[number >> 2] >> 2 * (number & 3) & 3;
    uint16_t difference = (uint16_t)(code - 1);
    if (code == ESCAPED) {
        if (from->small == from->small_end) return false;
        uint16_t value = *from->small++;
        if (value == GOES_ON) {
            if (from->large_end - from->large < 2) return false;
            value = get16(from->large);
            from->large += 2;
        }
        difference = unzigzag(value);
    }
    add_at(chunk, place, difference);
    return true;
}

static bool columns_done(const struct columns *from) {
    return from->small == from->small_end && from->large == from->large_end;
}

static const char *apply_sparse(uint8_t *chunk, size_t words, const uint8_t *gaps, size_t count,
                                struct columns *from, size_t code_bytes) {
    size_t place = 0, number = 0;
    for (size_t i = 0; i < count; i++) {
        place += gaps[i];
        if (gaps[i] == GOES_ON) continue;
        if (place >= words) return "a sparse chunk reaches past its end";
        if (number >> 2 >= code_bytes || !apply_code(from, number, chunk, place))
            return "a sparse chunk has too few codes";
        number++;
        place++;
    }
    if (place > words) return "a sparse chunk reaches past its end";
    return columns_done(from) ? NULL : "a sparse chunk has too many codes";
}

static const char *apply_dense(uint8_t *chunk, size_t words, struct columns *from) {
    for (size_t place = 0; place < words; place++)
        if (!apply_code(from, place, chunk, place)) return "a dense chunk has too few codes";
    return columns_done(from) ? NULL : "a dense chunk has too many codes";
}

/* --- split chunks: numbers in Rice codes
 *
 * A number n of a block with the parameter k: its k low bits in one stream, n >> k zeros and a one in
 * another. Both streams begin with the lowest bit of a byte; the low bits of a block begin a byte.
 */

struct rice {
    const uint32_t *numbers;
    size_t count;
};

static inline size_t rice_blocks(size_t count) { return (count + RICE_BLOCK - 1) / RICE_BLOCK; }

/* The parameter with which the block takes the fewest bits; of several, the smallest. bits: set to the
 * number of its zeros and ones. */
static unsigned best_rice(const uint32_t *numbers, size_t count, size_t *bits) {
    uint64_t now = 0;
    for (size_t i = 0; i < count; i++) now += numbers[i];
    for (unsigned k = 0;; k++) {
        uint64_t then = 0;
        for (size_t i = 0; i < count; i++) then += numbers[i] >> (k + 1);
        if (k == RICE_MAX || now - then <= count) {
            *bits = (size_t)now + count;
            return k;
        }
        now = then;
    }
}

/* Choose a parameter for each block, and sum the sizes of the streams. */
static void measure_rice(struct rice of, uint8_t *parameters, size_t *low_bytes,
                         size_t *unary_bits) {
    for (size_t start = 0; start < of.count; start += RICE_BLOCK) {
        size_t count = min_size(of.count - start, RICE_BLOCK), bits;
        *parameters = (uint8_t)best_rice(of.numbers + start, count, &bits);
        *low_bytes += (count * *parameters + 7) / 8;
        *unary_bits += bits;
        parameters++;
    }
}

/* `unary` must be zeroed. Return the bit after the last one that was written to it. */
static size_t write_rice(struct rice of, const uint8_t *parameters, uint8_t **low, uint8_t *unary,
                         size_t bit) {
    for (size_t start = 0; start < of.count; start += RICE_BLOCK) {
        unsigned k = *parameters++, held = 0;
        uint64_t waiting = 0;
        size_t end = start + min_size(of.count - start, RICE_BLOCK);
        for (size_t i = start; i < end; i++) {
            uint32_t number = of.numbers[i];
            bit += number >> k;
            unary[bit >> 3] |= (uint8_t)(1 << (bit & 7));
            bit++;
            waiting |= (uint64_t)(number & ((1u << k) - 1)) << held;
            for (held += k; held >= 8; held -= 8) {
                *(*low)++ = (uint8_t)waiting;
                waiting >>= 8;
            }
        }
        if (held) *(*low)++ = (uint8_t)waiting;
    }
    return bit;
}

struct split_source {
    const uint8_t *parameters; /* two in a byte */
    size_t block;              /* the number of the next block */
    const uint8_t *low, *low_end;
    const uint8_t *unary, *end; /* end: of the payload */
    size_t bit, unary_bits;
};

static inline unsigned parameter_at(const uint8_t *parameters, size_t block) {
    return parameters[block >> 1] >> 4 * (block & 1) & 15;
}

/* Up to 57 bits of the stream from `bit` on; zeros after its end. */
static inline uint64_t bits_at(const uint8_t *bytes, size_t length, size_t bit) {
    size_t at = bit >> 3;
    if (at + 8 <= length) return get64(bytes + at) >> (bit & 7);
    uint64_t found = 0;
    for (size_t i = at; i < length; i++) found |= (uint64_t)bytes[i] << 8 * (i - at);
    return found >> (bit & 7);
}

/* Count the zeros from `bit` on, and go past the 1 bit after them; the window then begins behind it.
 * False: there is no 1 bit. */
static bool read_unary(struct split_source *from, uint64_t *window, uint64_t *zeros) {
    const uint64_t valid = ((uint64_t)1 << 57) - 1;
    *zeros = 0;
    if (*window == 0) {
        /* How many bits the window has matters only here. */
        while ((*window = bits_at(from->unary, from->unary_bits >> 3, from->bit) & valid) == 0) {
            if (from->bit + 57 >= from->unary_bits) return false;
            from->bit += 57;
            *zeros += 57;
        }
    }
    unsigned more = lowest_bit(*window);
    *window = *window >> more >> 1;
    from->bit += more + 1;
    *zeros += more;
    return true;
}

/* False: a stream ends too soon, or a number is larger than the largest that is allowed. */
static bool read_rice(struct split_source *from, size_t count, uint32_t largest, uint32_t *out) {
    uint64_t window = 0, zeros;
    for (size_t start = 0; start < count; start += RICE_BLOCK) {
        unsigned k = parameter_at(from->parameters, from->block++);
        uint32_t mask = (1u << k) - 1;
        size_t in_block = min_size(count - start, RICE_BLOCK);
        size_t low_bytes = (in_block * k + 7) / 8, low_bit = 0;
        if ((size_t)(from->low_end - from->low) < low_bytes) return false;
        /* A read of eight bytes may reach into the next columns, but not past the payload. */
        size_t readable = (size_t)(from->end - from->low);
        for (size_t i = 0; i < in_block; i++, low_bit += k) {
            if (!read_unary(from, &window, &zeros)) return false;
            uint64_t low = k ? bits_at(from->low, readable, low_bit) & mask : 0;
            uint64_t number = zeros << k | low;
            if (number > largest) return false;
            out[start + i] = (uint32_t)number;
        }
        from->low += low_bytes;
    }
    return true;
}

/* --- split chunks
 *
 *     counts | escapes | parameters | signs | low bits | zeros and ones | odd last byte
 *
 * The changes are in the order of their classes. delta_split.py describes the columns.
 */

struct split {
    uint32_t *gaps;           /* of all classes, one after the other */
    uint16_t *differences;    /* in that order */
    uint32_t *escape_gaps;    /* unescaped changes before each escaped one */
    uint32_t *escape_sizes;   /* |difference| - 2 of each */
    uint8_t *parameters;      /* a byte for each */
    uint32_t class_counts[CLASSES];
    size_t count, escapes, low_bytes, unary_bits;
};

static size_t split_blocks(const struct split *of) {
    return rice_blocks(of->count) + 2 * rice_blocks(of->escapes);
}

/* Put the changes in order, and choose the parameters. */
static void order_changes(const struct changes *found, struct split *out) {
    size_t starts[CLASSES], start = 0;
    for (size_t i = 0; i < found->count; i++) out->class_counts[found->classes[i]]++;
    for (unsigned class = 0; class < CLASSES; class++) {
        starts[class] = start;
        start += out->class_counts[class];
    }
    for (size_t i = 0; i < found->count; i++) {
        size_t at = starts[found->classes[i]]++;
        out->gaps[at] = found->class_gaps[i];
        out->differences[at] = found->differences[i];
    }
    out->count = found->count;
    size_t next = 0;
    for (size_t i = 0; i < out->count; i++) {
        uint16_t difference = out->differences[i];
        uint16_t size = difference >> 15 ? (uint16_t)-difference : difference;
        /* The next change overwrites this if this one is not escaped. */
        out->escape_gaps[out->escapes] = (uint32_t)(i - next);
        out->escape_sizes[out->escapes] = size - 2u;
        out->escapes += size > 1;
        next = size > 1 ? i + 1 : next;
    }
    uint8_t *parameters = out->parameters;
    measure_rice((struct rice){out->gaps, out->count}, parameters, &out->low_bytes,
                 &out->unary_bits);
    parameters += rice_blocks(out->count);
    measure_rice((struct rice){out->escape_gaps, out->escapes}, parameters, &out->low_bytes,
                 &out->unary_bits);
    parameters += rice_blocks(out->escapes);
    measure_rice((struct rice){out->escape_sizes, out->escapes}, parameters, &out->low_bytes,
                 &out->unary_bits);
}

static size_t split_bytes(const struct split *of) {
    return SPLIT_HEAD + (split_blocks(of) + 1) / 2 + (of->count + 7) / 8 + of->low_bytes +
           (of->unary_bits + 7) / 8;
}

/* Write a split chunk of split_bytes() bytes; `out` must be zeroed. */
static void write_split(const struct split *of, uint8_t *out) {
    for (unsigned class = 0; class < CLASSES; class++)
        put32(out + 4 * class, of->class_counts[class]);
    put32(out + 4 * CLASSES, (uint32_t)of->escapes);
    out += SPLIT_HEAD;
    for (size_t i = 0; i < split_blocks(of); i++)
        out[i >> 1] |= (uint8_t)(of->parameters[i] << 4 * (i & 1));
    out += (split_blocks(of) + 1) / 2;
    for (size_t i = 0; i < of->count; i++)
        out[i >> 3] |= (uint8_t)((of->differences[i] >> 15) << (i & 7));
    out += (of->count + 7) / 8;
    uint8_t *low = out, *unary = out + of->low_bytes;
    const uint8_t *parameters = of->parameters;
    size_t bit = write_rice((struct rice){of->gaps, of->count}, parameters, &low, unary, 0);
    parameters += rice_blocks(of->count);
    bit = write_rice((struct rice){of->escape_gaps, of->escapes}, parameters, &low, unary, bit);
    parameters += rice_blocks(of->escapes);
    write_rice((struct rice){of->escape_sizes, of->escapes}, parameters, &low, unary, bit);
}

struct split_sizes {
    uint32_t class_counts[CLASSES];
    size_t count, escapes;
};

/* Read and check the head of a payload. */
static const char *read_split_head(const uint8_t *payload, size_t length, size_t limit,
                                   struct split_sizes *out) {
    if (length < SPLIT_HEAD) return "a split chunk ends before its columns";
    out->count = 0;
    for (unsigned class = 0; class < CLASSES; class++) {
        out->class_counts[class] = get32(payload + 4 * class);
        out->count += out->class_counts[class];
    }
    out->escapes = get32(payload + 4 * CLASSES);
    if (out->count > limit) return "a split chunk changes too many words";
    if (out->escapes > out->count) return "a split chunk has too many large differences";
    return NULL;
}

/* The room that decoding needs beside the chunk. */
struct split_room {
    uint32_t *gaps, *escape_gaps, *escape_sizes;
    uint16_t *differences;
};

static const char *apply_split(uint8_t *chunk, size_t words, const uint8_t *payload, size_t length,
                               const struct split_sizes *sizes, struct split_room *room, int level) {
    size_t count = sizes->count, escapes = sizes->escapes;
    size_t blocks = rice_blocks(count) + 2 * rice_blocks(escapes);
    size_t parameter_bytes = (blocks + 1) / 2, sign_bytes = (count + 7) / 8;
    if (length - SPLIT_HEAD < parameter_bytes + sign_bytes)
        return "a split chunk ends before its columns";
    const uint8_t *parameters = payload + SPLIT_HEAD, *signs = parameters + parameter_bytes;
    const uint8_t *low = signs + sign_bytes;
    size_t left = length - SPLIT_HEAD - parameter_bytes - sign_bytes, low_bytes = 0, block = 0;
    const size_t counts[3] = {count, escapes, escapes};
    for (int column = 0; column < 3; column++)
        for (size_t start = 0; start < counts[column]; start += RICE_BLOCK) {
            size_t in_block = min_size(counts[column] - start, RICE_BLOCK);
            low_bytes += (in_block * parameter_at(parameters, block++) + 7) / 8;
        }
    if (left < low_bytes) return "a split chunk ends before its columns";
    size_t unary_bytes = left - low_bytes;
    /* With the best parameter, numbers take no more zeros than this on average. */
    if (unary_bytes > (3 * (count + 2 * escapes) + (words >> RICE_MAX) + 7) / 8)
        return "a split chunk has too many gaps";
    struct split_source from = {
        parameters, 0, low, low + low_bytes, low + low_bytes, payload + length, 0, 8 * unary_bytes};
    if (!read_rice(&from, count, (uint32_t)words, room->gaps) ||
        !read_rice(&from, escapes, (uint32_t)count, room->escape_gaps) ||
        !read_rice(&from, escapes, 32766, room->escape_sizes))
        return "a split chunk has impossible numbers";
    if ((from.bit + 7) / 8 != unary_bytes || bits_at(from.unary, unary_bytes, from.bit) != 0)
        return "a split chunk has numbers left over";
    for (size_t i = 0; i < count; i++)
        room->differences[i] = (uint16_t)(1 - 2 * (signs[i >> 3] >> (i & 7) & 1));
    size_t at = 0;
    for (size_t i = 0; i < escapes; i++, at++) {
        at += room->escape_gaps[i];
        if (at >= count) return "a split chunk reaches past its changes";
        room->differences[at] = (uint16_t)(room->differences[at] * (room->escape_sizes[i] + 2));
    }
    struct cursor cursors[CLASSES];
    struct table table;
    size_t start = 0;
    for (unsigned class = 0; class < CLASSES; class++) {
        cursors[class] =
            first_change(room->gaps + start, room->differences + start, sizes->class_counts[class]);
        start += sizes->class_counts[class];
    }
    memset(table.total, 0, sizeof table.total);
    AT_LEVEL(level, apply_classes, chunk, words, &table, cursors);
    for (unsigned class = 0; class < CLASSES; class++)
        if (cursors[class].rank != NEVER) return "a split chunk reaches past its end";
    return NULL;
}

/* --- memory
 *
 * A call needs a few megabytes and writes to part of them: fresh pages would take a third of its time. So
 * large blocks are kept for the next call. These functions are called with the GIL, which guards the blocks.
 */

#define KEPT_BLOCKS_MAX 64         /* a dozen for each of the threads that encode */
#define KEPT_MIN ((size_t)1 << 16) /* malloc itself keeps the pages of smaller blocks */
#define KEPT_MAX ((size_t)1 << 22) /* no block for a chunk of 8 MiB is larger */

struct kept {
    size_t size; /* in front of each block */
    uint64_t unused;
};

#if defined(__SANITIZE_ADDRESS__)
/* AddressSanitizer finds a read past the end of a block only if the block is new. */
static void *borrow(size_t size) { return PyMem_Malloc(size); }
static void give_back(void *memory) { PyMem_Free(memory); }
static void free_kept(void) {}
#else
static struct kept *kept_blocks[KEPT_BLOCKS_MAX];
static size_t kept_next;

static bool is_kept(size_t size) { return size >= KEPT_MIN && size <= KEPT_MAX; }

static void *borrow(size_t size) {
    for (size_t i = 0; is_kept(size) && i < KEPT_BLOCKS_MAX; i++) {
        struct kept *found = kept_blocks[i];
        if (found != NULL && found->size >= size && found->size <= 2 * size) {
            kept_blocks[i] = NULL;
            return found + 1;
        }
    }
    struct kept *made = PyMem_Malloc(sizeof *made + size);
    if (made == NULL) return NULL;
    made->size = size;
    return made + 1;
}

static void give_back(void *memory) {
    if (memory == NULL) return;
    struct kept *block = (struct kept *)memory - 1;
    if (!is_kept(block->size)) {
        PyMem_Free(block);
        return;
    }
    size_t at = 0;
    while (at < KEPT_BLOCKS_MAX && kept_blocks[at] != NULL) at++;
    if (at == KEPT_BLOCKS_MAX) {
        /* The sizes needed may have changed, so the kept blocks are replaced in turn. */
        at = kept_next++ % KEPT_BLOCKS_MAX;
        PyMem_Free(kept_blocks[at]);
    }
    kept_blocks[at] = block;
}

static void free_kept(void) {
    for (size_t i = 0; i < KEPT_BLOCKS_MAX; i++) {
        PyMem_Free(kept_blocks[i]);
        kept_blocks[i] = NULL;
    }
}
#endif

/* --- the functions that Python sees */

static PyObject *refused(const char *why) {
    if (why == NULL) Py_RETURN_NONE;
    return PyUnicode_FromString(why);
}

static bool fits_level(int level) {
    if (PLAIN <= level && level <= best_level()) return true;
    PyErr_SetString(PyExc_ValueError, "this CPU does not have that level");
    return false;
}

/* New bytes, zeroed; *at points to their beginning. */
static PyObject *new_bytes(size_t length, uint8_t **at) {
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (made == NULL) return NULL;
    *at = (uint8_t *)PyBytes_AsString(made);
    memset(*at, 0, length);
    return made;
}

/* Room for the columns of this many words, and one more. */
static bool new_columns(size_t count, size_t gaps, struct columns_made *out) {
    *out = (struct columns_made){.gaps = borrow(gaps + 1),
                                 .codes = borrow(count / 4 + 1),
                                 .small = borrow(count + 1),
                                 .large = borrow(2 * count + 2)};
    if (out->gaps && out->codes && out->small && out->large) return true;
    PyErr_NoMemory();
    return false;
}

static void free_columns(struct columns_made *of) {
    give_back(of->gaps);
    give_back(of->codes);
    give_back(of->small);
    give_back(of->large);
}

static PyObject *bytes_between(const uint8_t *start, const uint8_t *end) {
    return PyBytes_FromStringAndSize((const char *)start, end - start);
}

/* The columns as a tuple of bytes; without gaps if there are none. */
static PyObject *tuple_of(const struct columns_made *of) {
    PyObject *all[4] = {of->gaps_end ? bytes_between(of->gaps, of->gaps_end) : NULL,
                        bytes_between(of->codes, of->codes_end),
                        bytes_between(of->small, of->small_end),
                        bytes_between(of->large, of->large_end)};
    PyObject *made = NULL;
    if (all[1] && all[2] && all[3])
        made = of->gaps_end ? all[0] ? PyTuple_Pack(4, all[0], all[1], all[2], all[3]) : NULL
                            : PyTuple_Pack(3, all[1], all[2], all[3]);
    for (int i = 0; i < 4; i++) Py_XDECREF(all[i]);
    return made;
}

static PyObject *columns_of(const struct changes *found, size_t words) {
    struct columns_made columns;
    PyObject *made = NULL;
    if (new_columns(found->count, found->count + words / GOES_ON, &columns)) {
        Py_BEGIN_ALLOW_THREADS
        write_columns(found, &columns);
        Py_END_ALLOW_THREADS
        made = tuple_of(&columns);
    }
    free_columns(&columns);
    return made;
}

static PyObject *split_of(const struct changes *found) {
    size_t count = found->count;
    struct split split = {0};
    split.gaps = borrow(4 * count + 1);
    split.differences = borrow(2 * count + 1);
    split.escape_gaps = borrow(4 * count + 4);
    split.escape_sizes = borrow(4 * count + 4);
    split.parameters = borrow(3 * rice_blocks(count) + 1);
    PyObject *made = NULL;
    if (split.gaps && split.differences && split.escape_gaps && split.escape_sizes &&
        split.parameters) {
        uint8_t *out;
        Py_BEGIN_ALLOW_THREADS
        order_changes(found, &split);
        Py_END_ALLOW_THREADS
        made = new_bytes(split_bytes(&split), &out);
        if (made) {
            Py_BEGIN_ALLOW_THREADS
            write_split(&split, out);
            Py_END_ALLOW_THREADS
        }
    } else {
        PyErr_NoMemory();
    }
    give_back(split.gaps);
    give_back(split.differences);
    give_back(split.escape_gaps);
    give_back(split.escape_sizes);
    give_back(split.parameters);
    return made;
}

static PyObject *encode_found(const Py_buffer *new, const Py_buffer *base, size_t limit, bool split,
                              int level) {
    struct changes found = {0};
    size_t words = (size_t)new->len / 2;
    bool few = false;
    PyObject *made = NULL;
    found.limit = limit = min_size(limit, words);
    size_t room = limit + TABLE * BLOCK;
    struct table table; /* 16 KiB: it fits into the nearest cache with all else that is written often */
    found.places = borrow(4 * room);
    found.differences = borrow(2 * room);
    found.classes = split ? borrow(room) : NULL;
    found.class_gaps = split ? borrow(4 * room) : NULL;
    if (!found.places || !found.differences ||
        (split && !(found.classes && found.class_gaps))) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        memset(table.total, 0, sizeof table.total);
        few = AT_LEVEL(level, find, new->buf, base->buf, words, split ? &table : NULL, &found);
        Py_END_ALLOW_THREADS
        if (!few) {
            made = Py_None;
            Py_INCREF(made);
        } else {
            PyObject *columns = columns_of(&found, words), *other = NULL;
            if (columns && (other = split ? split_of(&found) : PyBytes_FromStringAndSize("", 0)))
                made = PyTuple_Pack(2, columns, other);
            Py_XDECREF(columns);
            Py_XDECREF(other);
        }
    }
    give_back(found.places);
    give_back(found.differences);
    give_back(found.classes);
    give_back(found.class_gaps);
    return made;
}

static bool same_words(const Py_buffer *new, const Py_buffer *base) {
    if (new->len == base->len && (size_t)new->len / 2 <= WORDS_MAX) return true;
    PyErr_SetString(PyExc_ValueError, "the chunk and its base are not of one length");
    return false;
}

static PyObject *encode_sparse(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer new, base;
    Py_ssize_t limit;
    int split, level;
    if (!PyArg_ParseTuple(args, "y*y*npi", &new, &base, &limit, &split, &level)) return NULL;
    PyObject *made = NULL;
    if (fits_level(level) && same_words(&new, &base))
        made = encode_found(&new, &base, limit < 0 ? 0 : (size_t)limit, split != 0, level);
    PyBuffer_Release(&new);
    PyBuffer_Release(&base);
    return made;
}

static PyObject *encode_dense(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer new, base;
    if (!PyArg_ParseTuple(args, "y*y*", &new, &base)) return NULL;
    PyObject *made = NULL;
    struct columns_made columns;
    size_t words = (size_t)new.len / 2;
    if (same_words(&new, &base)) {
        if (new_columns(words, 0, &columns)) {
            Py_BEGIN_ALLOW_THREADS
            write_dense(new.buf, base.buf, words, &columns);
            Py_END_ALLOW_THREADS
            made = tuple_of(&columns);
        }
        free_columns(&columns);
    }
    PyBuffer_Release(&new);
    PyBuffer_Release(&base);
    return made;
}

static PyObject *count_escaped(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer codes;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n", &codes, &count)) return NULL;
    const uint8_t *at = codes.buf;
    size_t numbers = min_size(count < 0 ? 0 : (size_t)count, 4 * (size_t)codes.len), found = 0;
    Py_BEGIN_ALLOW_THREADS
    size_t i = 0;
    for (; i + 32 <= numbers; i += 32) {
        uint64_t pairs = get64(at + i / 4);
        uint64_t both = pairs & pairs >> 1 & UINT64_C(0x5555555555555555);
        both = (both & UINT64_C(0x3333333333333333)) + (both >> 2 & UINT64_C(0x3333333333333333));
        both = (both + (both >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F);
        found += (size_t)(both * UINT64_C(0x0101010101010101) >> 56);
    }
    for (; i < numbers; i++) found += (at[i >> 2] >> 2 * (i & 3) & 3) == ESCAPED;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&codes);
    return PyLong_FromSize_t(found);
}

static PyObject *decode_columns(PyObject *args, bool sparse) {
    Py_buffer chunk, gaps = {0}, codes, small, large;
    int parsed = sparse ? PyArg_ParseTuple(args, "w*y*y*y*y*", &chunk, &gaps, &codes, &small, &large)
                        : PyArg_ParseTuple(args, "w*y*y*y*", &chunk, &codes, &small, &large);
    if (!parsed) return NULL;
    const char *why = NULL;
    const uint8_t *first = small.buf, *second = large.buf;
    struct columns from = {codes.buf, first, first + small.len, second, second + large.len};
    size_t words = (size_t)chunk.len / 2;
    Py_BEGIN_ALLOW_THREADS
    if (sparse)
        why = apply_sparse(chunk.buf, words, gaps.buf, (size_t)gaps.len, &from, (size_t)codes.len);
    else if ((size_t)codes.len != (words + 3) / 4)
        why = "a dense chunk has too few codes";
    else
        why = apply_dense(chunk.buf, words, &from);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&chunk);
    if (sparse) PyBuffer_Release(&gaps);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&small);
    PyBuffer_Release(&large);
    return refused(why);
}

static PyObject *decode_sparse(PyObject *module, PyObject *args) {
    (void)module;
    return decode_columns(args, true);
}

static PyObject *decode_dense(PyObject *module, PyObject *args) {
    (void)module;
    return decode_columns(args, false);
}

static PyObject *decode_split(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer chunk, payload;
    Py_ssize_t limit;
    int level;
    if (!PyArg_ParseTuple(args, "w*y*ni", &chunk, &payload, &limit, &level)) return NULL;
    PyObject *result = NULL;
    struct split_sizes sizes;
    struct split_room room = {0};
    size_t words = (size_t)chunk.len / 2, length = (size_t)payload.len;
    if (!fits_level(level)) goto done;
    const char *why = words > WORDS_MAX ? "a split chunk is too long" : NULL;
    if (!why)
        why = read_split_head(payload.buf, length, min_size(limit < 0 ? 0 : (size_t)limit, words),
                              &sizes);
    if (why) {
        result = refused(why);
        goto done;
    }
    room.gaps = borrow(4 * sizes.count + 1);
    room.differences = borrow(2 * sizes.count + 1);
    room.escape_gaps = borrow(4 * sizes.escapes + 1);
    room.escape_sizes = borrow(4 * sizes.escapes + 1);
    if (!room.gaps || !room.differences || !room.escape_gaps || !room.escape_sizes) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    why = apply_split(chunk.buf, words, payload.buf, length, &sizes, &room, level);
    Py_END_ALLOW_THREADS
    result = refused(why);
done:
    give_back(room.gaps);
    give_back(room.differences);
    give_back(room.escape_gaps);
    give_back(room.escape_sizes);
    PyBuffer_Release(&chunk);
    PyBuffer_Release(&payload);
    return result;
}

/* Split a chunk into its planes, or join the planes into the chunk. */
static PyObject *convert_planes(PyObject *args, bool part) {
    Py_buffer new, high, low;
    int level;
    const char *wanted = part ? "y*w*w*i" : "w*y*y*i";
    if (!PyArg_ParseTuple(args, wanted, &new, &high, &low, &level)) return NULL;
    size_t words = (size_t)new.len / 2;
    bool fits = fits_level(level);
    if (fits && ((size_t)high.len != words || (size_t)low.len != words)) {
        PyErr_SetString(PyExc_ValueError, "a plane has the wrong length");
        fits = false;
    }
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        if (part)
            AT_LEVEL(level, part_planes, new.buf, words, high.buf, low.buf);
        else
            AT_LEVEL(level, join_planes, high.buf, low.buf, words, new.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&new);
    PyBuffer_Release(&high);
    PyBuffer_Release(&low);
    return fits ? refused(NULL) : NULL;
}

static PyObject *part_planes(PyObject *module, PyObject *args) {
    (void)module;
    return convert_planes(args, true);
}

static PyObject *join_planes(PyObject *module, PyObject *args) {
    (void)module;
    return convert_planes(args, false);
}

static PyObject *best_level_of_cpu(PyObject *module, PyObject *nothing) {
    (void)module;
    (void)nothing;
    return PyLong_FromLong(best_level());
}

static PyObject *free_memory(PyObject *module, PyObject *nothing) {
    (void)module;
    (void)nothing;
    free_kept();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"best_level", best_level_of_cpu, METH_NOARGS, "The highest level of this CPU."},
    {"free_memory", free_memory, METH_NOARGS, "Free the blocks that are kept for the next call."},
    {"encode_sparse", encode_sparse, METH_VARARGS, "Columns and split of a sparse chunk, or None."},
    {"encode_dense", encode_dense, METH_VARARGS, "Columns of a dense chunk."},
    {"count_escaped", count_escaped, METH_VARARGS, "How many of the codes are 3."},
    {"decode_sparse", decode_sparse, METH_VARARGS, "Apply a sparse chunk; None, or what is wrong."},
    {"decode_dense", decode_dense, METH_VARARGS, "Apply a dense chunk; None, or what is wrong."},
    {"decode_split", decode_split, METH_VARARGS, "Apply a split chunk; None, or what is wrong."},
    {"part_planes", part_planes, METH_VARARGS, "Part a chunk into the planes of mode full."},
    {"join_planes", join_planes, METH_VARARGS, "Join the planes of mode full."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_words", "The loops of the delta codec.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__words(void) { return PyModule_Create(&definition); }
