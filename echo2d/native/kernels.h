/* The loops over all words of a chunk, compiled once for each level: with LEVEL as its name, TARGET as
 * the instructions that it may use, and IS_AVX512, IS_AVX2 or neither. Included by words.c only.
 *
 * A block is BLOCK words; bit i of a mask stands for its word i.
 */

/* What follows is used per level: a block's classes, a byte for each word. */
#if defined(IS_AVX512)
typedef __m512i NAME(classes);
#elif defined(IS_AVX2)
typedef struct {
    __m256i low, high;
} NAME(classes);
#else
typedef struct {
    uint8_t of[BLOCK];
} NAME(classes);
#endif

/* The words of the block that differ. */
TARGET static inline uint64_t NAME(differing)(const uint8_t *new, const uint8_t *base) {
#if defined(IS_AVX512)
    uint64_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(new), _mm512_loadu_si512(base));
    uint64_t high =
        _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(new + 64), _mm512_loadu_si512(base + 64));
    return low | high << 32;
#elif defined(IS_AVX2)
    uint64_t mask = 0;
    for (int half = 0; half < 2; half++) {
        const __m256i *mine = (const __m256i *)(new + 64 * half);
        const __m256i *theirs = (const __m256i *)(base + 64 * half);
        __m256i first = _mm256_cmpeq_epi16(_mm256_loadu_si256(mine), _mm256_loadu_si256(theirs));
        __m256i second =
            _mm256_cmpeq_epi16(_mm256_loadu_si256(mine + 1), _mm256_loadu_si256(theirs + 1));
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
        mask |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(bytes) << 32 * half;
    }
    return mask;
#else
    uint64_t mask = 0;
    for (int four = 0; four < BLOCK / 4; four++) {
        uint64_t differs = get64(new + 8 * four) ^ get64(base + 8 * four);
        if (differs == 0) continue;
        for (int i = 0; i < 4; i++)
            mask |= (uint64_t)((differs >> 16 * i & 0xFFFF) != 0) << (4 * four + i);
    }
    return mask;
#endif
}

TARGET static inline NAME(classes) NAME(classes_of)(const uint8_t *base) {
#if defined(IS_AVX512)
    const __m512i byte = _mm512_set1_epi16(255);
    __m512i low = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(base), 7), byte);
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(base + 64), 7), byte);
    const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high));
    return _mm512_min_epu8(_mm512_subs_epu8(bytes, _mm512_set1_epi8(LOWEST)),
                           _mm512_set1_epi8(CLASSES - 1));
#elif defined(IS_AVX2)
    const __m256i byte = _mm256_set1_epi16(255);
    __m256i halves[2];
    for (int half = 0; half < 2; half++) {
        const __m256i *from = (const __m256i *)(base + 64 * half);
        __m256i first = _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(from), 7), byte);
        __m256i second =
            _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(from + 1), 7), byte);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xD8);
        halves[half] = _mm256_min_epu8(_mm256_subs_epu8(bytes, _mm256_set1_epi8(LOWEST)),
                                       _mm256_set1_epi8(CLASSES - 1));
    }
    return (NAME(classes)){halves[0], halves[1]};
#else
    NAME(classes) found;
    for (int i = 0; i < BLOCK; i++) found.of[i] = (uint8_t)class_of(word_at(base, (size_t)i));
    return found;
#endif
}

/* The words of the block that are in the class. */
TARGET static inline uint64_t NAME(in_class)(const NAME(classes) *classes, unsigned class) {
#if defined(IS_AVX512)
    return _mm512_cmpeq_epi8_mask(*classes, _mm512_set1_epi8((char)class));
#elif defined(IS_AVX2)
    __m256i wanted = _mm256_set1_epi8((char)class);
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(classes->low, wanted));
    uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(classes->high, wanted));
    return low | (uint64_t)high << 32;
#else
    uint64_t mask = 0;
    for (int i = 0; i < BLOCK; i++) mask |= (uint64_t)(classes->of[i] == class) << i;
    return mask;
#endif
}

TARGET static inline unsigned NAME(ones)(uint64_t mask) {
#if defined(IS_AVX512) || defined(IS_AVX2)
    return (unsigned)_mm_popcnt_u64(mask);
#else
    unsigned count = 0;
    for (; mask; mask &= mask - 1) count++;
    return count;
#endif
}

/* The place of the one that has so many ones below it. There is such a one. */
TARGET static inline unsigned NAME(one_after)(uint64_t mask, unsigned ones) {
#if defined(IS_AVX512) || defined(IS_AVX2)
    return lowest_bit(_pdep_u64((uint64_t)1 << ones, mask));
#else
    while (ones--) mask &= mask - 1;
    return lowest_bit(mask);
#endif
}

/* Add how many words of each class the block has. */
TARGET static inline void NAME(count_classes)(const NAME(classes) *classes, uint32_t *counts) {
#if defined(IS_AVX512) || defined(IS_AVX2)
    for (unsigned class = 0; class < CLASSES; class++)
        counts[class] += NAME(ones)(NAME(in_class)(classes, class));
#else
    for (int i = 0; i < BLOCK; i++) counts[classes->of[i]]++;
#endif
}

/* Find the changes. False: there are more than the limit. */
TARGET static bool NAME(find)(const uint8_t *new, const uint8_t *base, size_t words, bool split,
                              struct changes *out) {
    size_t start = 0;
    for (; start + BLOCK <= words; start += BLOCK) {
        uint64_t differing = NAME(differing)(new + 2 * start, base + 2 * start);
        if (split) {
            NAME(classes) classes = NAME(classes_of)(base + 2 * start);
            for (; differing; differing &= differing - 1) {
                unsigned bit = lowest_bit(differing);
                size_t place = start + bit;
                unsigned class = class_of(word_at(base, place));
                uint64_t before = NAME(in_class)(&classes, class) & (((uint64_t)1 << bit) - 1);
                note_class(out, class, out->seen[class] + NAME(ones)(before));
                note_change(out, place, (uint16_t)(word_at(new, place) - word_at(base, place)));
            }
            NAME(count_classes)(&classes, out->seen);
        } else {
            for (; differing; differing &= differing - 1) {
                size_t place = start + lowest_bit(differing);
                note_change(out, place, (uint16_t)(word_at(new, place) - word_at(base, place)));
            }
        }
        if (out->count > out->limit) return false;
    }
    for (size_t place = start; place < words; place++) {
        unsigned class = class_of(word_at(base, place));
        uint16_t difference = (uint16_t)(word_at(new, place) - word_at(base, place));
        if (difference) {
            if (split) note_class(out, class, out->seen[class]);
            note_change(out, place, difference);
        }
        out->seen[class]++;
    }
    return out->count <= out->limit;
}

/* Apply the changes of all classes, as far as the chunk's words go. */
TARGET static void NAME(apply_classes)(uint8_t *chunk, size_t words, struct cursors *at) {
    size_t start = 0;
    for (; start + BLOCK <= words; start += BLOCK) {
        /* Classes are those of the base: all are read before a word of the block is changed. */
        NAME(classes) classes = NAME(classes_of)(chunk + 2 * start);
#if !defined(IS_AVX512) && !defined(IS_AVX2)
        uint32_t counts[CLASSES] = {0};
        NAME(count_classes)(&classes, counts);
#endif
        for (unsigned class = 0; class < CLASSES; class++) {
#if defined(IS_AVX512) || defined(IS_AVX2)
            uint64_t mask = NAME(in_class)(&classes, class);
            unsigned count = NAME(ones)(mask);
            if (at->left[class] >= count) {
                at->left[class] -= at->left[class] == NEVER ? 0 : count;
                continue;
            }
#else
            unsigned count = counts[class];
            if (at->left[class] >= count) {
                at->left[class] -= at->left[class] == NEVER ? 0 : count;
                continue;
            }
            uint64_t mask = NAME(in_class)(&classes, class);
#endif
            while (at->left[class] < count) {
                unsigned bit = NAME(one_after)(mask, at->left[class]);
                count -= at->left[class] + 1;
                mask &= ~(((uint64_t)2 << bit) - 1);
                add_at(chunk, start + bit, take_change(at, class));
            }
            at->left[class] -= at->left[class] == NEVER ? 0 : count;
        }
    }
    for (size_t place = start; place < words; place++) apply_word(at, chunk, place);
}

/* The planes of mode full: each word rotated left by one bit, its high and its low byte. */
TARGET static void NAME(part_planes)(const uint8_t *new, size_t words, uint8_t *high,
                                     uint8_t *low) {
    for (size_t i = 0; i < words; i++) {
        uint16_t word = word_at(new, i);
        high[i] = (uint8_t)(word >> 7);
        low[i] = (uint8_t)(word << 1 | word >> 15);
    }
}

TARGET static void NAME(join_planes)(const uint8_t *high, const uint8_t *low, size_t words,
                                     uint8_t *new) {
    for (size_t i = 0; i < words; i++)
        put16(new + 2 * i, (uint16_t)(high[i] << 7 | low[i] >> 1 | (low[i] & 1) << 15));
}
