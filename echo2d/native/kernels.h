/* The loops over all words of a chunk, compiled once for each level: with LEVEL as its name, TARGET as
 * the instructions that it may use, and IS_AVX512, IS_AVX2 or neither. Included by words.c only.
 *
 * A block is BLOCK words; bit i of a mask is for its word i.
 */

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

#if defined(IS_AVX512)
/* Bytes with one bit each are the rows of 8 x 8 bits. After transposing, a row is a class, and has a bit
 * for each of 8 words. An affine product with a matrix uses its rows from the last to the first, so the
 * words are put in that order before. */
TARGET static inline __m512i NAME(transposed)(__m512i rows) {
    const __m512i bits = _mm512_set1_epi64((long long)0x8040201008040201);
    const __m512i eighths = _mm512_set_epi8(
        63, 55, 47, 39, 31, 23, 15, 7, 62, 54, 46, 38, 30, 22, 14, 6, 61, 53, 45, 37, 29, 21, 13, 5,
        60, 52, 44, 36, 28, 20, 12, 4, 59, 51, 43, 35, 27, 19, 11, 3, 58, 50, 42, 34, 26, 18, 10, 2,
        57, 49, 41, 33, 25, 17, 9, 1, 56, 48, 40, 32, 24, 16, 8, 0);
    return _mm512_permutexvar_epi8(eighths, _mm512_gf2p8affine_epi64_epi8(bits, rows, 0));
}
#endif

TARGET static inline unsigned NAME(ones)(uint64_t mask) {
#if defined(IS_AVX512) || defined(IS_AVX2)
    return (unsigned)_mm_popcnt_u64(mask);
#else
    mask -= mask >> 1 & UINT64_C(0x5555555555555555);
    mask = (mask & UINT64_C(0x3333333333333333)) + (mask >> 2 & UINT64_C(0x3333333333333333));
    mask = (mask + (mask >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F);
    return (unsigned)(mask * UINT64_C(0x0101010101010101) >> 56);
#endif
}

/* The place of the 1 bit that has `ones` 1 bits below it. The mask must have such a bit. */
TARGET static inline unsigned NAME(one_after)(uint64_t mask, unsigned ones) {
#if defined(IS_AVX512) || defined(IS_AVX2)
    return lowest_bit(_pdep_u64((uint64_t)1 << ones, mask));
#else
    while (ones--) mask &= mask - 1;
    return lowest_bit(mask);
#endif
}

/* Fill the table for `blocks` blocks from `base` on. */
TARGET static void NAME(tabulate)(const uint8_t *base, size_t blocks, struct table *table) {
#if defined(IS_AVX512)
    const __m512i backwards = _mm512_set_epi8(
        113, 115, 117, 119, 121, 123, 125, 127, 97, 99, 101, 103, 105, 107, 109, 111, 81, 83, 85, 87,
        89, 91, 93, 95, 65, 67, 69, 71, 73, 75, 77, 79, 49, 51, 53, 55, 57, 59, 61, 63, 33, 35, 37,
        39, 41, 43, 45, 47, 17, 19, 21, 23, 25, 27, 29, 31, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m512i bit_of_low = _mm512_set4_epi32(0, 0, (int)0x80402010, 0x08040201);
    const __m512i bit_of_high = _mm512_set4_epi32((int)0x80402010, 0x08040201, 0, 0);
    __m512i low_seen = _mm512_loadu_si512(table->total);
    __m512i high_seen = _mm512_loadu_si512(table->total + 8);
    for (size_t block = 0; block < blocks; block++, base += 2 * BLOCK) {
        fetch_ahead(base);
        fetch_ahead(base + 64);
        __m512i first = _mm512_slli_epi16(_mm512_loadu_si512(base), 1);
        __m512i second = _mm512_slli_epi16(_mm512_loadu_si512(base + 64), 1);
        __m512i bytes = _mm512_permutex2var_epi8(first, backwards, second);
        __m512i class = _mm512_min_epu8(_mm512_subs_epu8(bytes, _mm512_set1_epi8(LOWEST)),
                                        _mm512_set1_epi8(CLASSES - 1));
        __m512i low = NAME(transposed)(_mm512_shuffle_epi8(bit_of_low, class));
        __m512i high = NAME(transposed)(_mm512_shuffle_epi8(bit_of_high, class));
        _mm512_storeu_si512(table->masks[block], low);
        _mm512_storeu_si512(table->masks[block] + 8, high);
        _mm512_storeu_si512(table->seen[block], low_seen);
        _mm512_storeu_si512(table->seen[block] + 8, high_seen);
        low_seen = _mm512_add_epi64(low_seen, _mm512_popcnt_epi64(low));
        high_seen = _mm512_add_epi64(high_seen, _mm512_popcnt_epi64(high));
    }
    _mm512_storeu_si512(table->total, low_seen);
    _mm512_storeu_si512(table->total + 8, high_seen);
#else
    for (size_t block = 0; block < blocks; block++, base += 2 * BLOCK) {
        uint64_t *masks = table->masks[block];
        memcpy(table->seen[block], table->total, sizeof table->total);
#if defined(IS_AVX2)
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
        for (unsigned class = 0; class < CLASSES; class++) {
            __m256i wanted = _mm256_set1_epi8((char)class);
            uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(halves[0], wanted));
            uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(halves[1], wanted));
            masks[class] = low | (uint64_t)high << 32;
            table->total[class] += NAME(ones)(masks[class]);
        }
#else
        /* The four bits of all classes become four masks, eight words at a time: a product gathers the
         * lowest bits of eight bytes in its highest byte. */
        uint8_t classes[BLOCK];
        uint64_t bits[4] = {0}, low[4], high[4];
        for (unsigned i = 0; i < BLOCK; i++) classes[i] = (uint8_t)class_of(word_at(base, i));
        for (unsigned eight = 0; eight < BLOCK; eight += 8)
            for (unsigned bit = 0; bit < 4; bit++) {
                uint64_t lowest = get64(classes + eight) >> bit & UINT64_C(0x0101010101010101);
                bits[bit] |= (lowest * UINT64_C(0x0102040810204080) >> 56) << eight;
            }
        for (unsigned two = 0; two < 4; two++) {
            low[two] = (two & 1 ? bits[0] : ~bits[0]) & (two & 2 ? bits[1] : ~bits[1]);
            high[two] = (two & 1 ? bits[2] : ~bits[2]) & (two & 2 ? bits[3] : ~bits[3]);
        }
        for (unsigned class = 0; class < CLASSES; class++) {
            masks[class] = low[class & 3] & high[class >> 2];
            table->total[class] += NAME(ones)(masks[class]);
        }
#endif
    }
#endif
    /* Blocks that do not exist come after all changes. */
    for (size_t block = blocks; block < TABLE; block++)
        for (unsigned class = 0; class < CLASSES; class++) table->seen[block][class] = NEVER;
}

/* The changes of one table of blocks, in their order. The choice of the next block is not a branch,
 * because the CPU could not predict it. */
TARGET static void NAME(note_changes)(const uint8_t *new, const uint8_t *base, size_t first,
                                      size_t blocks, const struct table *table,
                                      struct changes *out) {
    uint64_t differing[TABLE + 1];
    size_t full[TABLE + 1], used = 0, changes = 0, at = 0;
    for (size_t block = 0; block < blocks; block++) {
        size_t start = 2 * BLOCK * (first + block);
        fetch_ahead(new + start);
        fetch_ahead(new + start + 64);
        fetch_ahead(base + start);
        fetch_ahead(base + start + 64);
        uint64_t mask = NAME(differing)(new + start, base + start);
        full[used] = block;
        differing[used] = mask;
        used += mask != 0;
        changes += NAME(ones)(mask);
    }
    full[used] = differing[used] = 0;
    /* Bytes may alias everything: without these copies, all pointers would be read again for each change. */
    uint32_t *restrict places = out->places + out->count;
    uint16_t *restrict differences = out->differences + out->count;
    uint8_t *restrict classes = table ? out->classes + out->count : NULL;
    uint32_t *restrict gaps = table ? out->class_gaps + out->count : NULL;
    uint32_t *restrict next = out->next;
    uint64_t mask = differing[0];
    for (size_t i = 0; i < changes; i++) {
        unsigned bit = lowest_bit(mask);
        size_t block = full[at], place = (first + block) * BLOCK + bit;
        uint16_t theirs = word_at(base, place);
        places[i] = (uint32_t)place;
        differences[i] = (uint16_t)(word_at(new, place) - theirs);
        if (table) {
            unsigned class = class_of(theirs);
            uint64_t before = table->masks[block][class] & (((uint64_t)1 << bit) - 1);
            uint32_t rank = (uint32_t)table->seen[block][class] + NAME(ones)(before);
            classes[i] = (uint8_t)class;
            gaps[i] = rank - next[class];
            next[class] = rank + 1;
        }
        mask &= mask - 1;
        at += mask == 0;
        mask = mask ? mask : differing[at];
    }
    out->count += changes;
}

/* Find the changes. False: there are more than the limit. */
TARGET static bool NAME(find)(const uint8_t *new, const uint8_t *base, size_t words,
                              struct table *table, struct changes *out) {
    for (size_t first = 0; first < words / BLOCK; first += TABLE) {
        size_t blocks = min_size(words / BLOCK - first, TABLE);
        if (table) NAME(tabulate)(base + 2 * BLOCK * first, blocks, table);
        NAME(note_changes)(new, base, first, blocks, table, out);
        if (out->count > out->limit) return false;
    }
    for (size_t place = words - words % BLOCK; place < words; place++) {
        unsigned class = class_of(word_at(base, place));
        uint16_t difference = (uint16_t)(word_at(new, place) - word_at(base, place));
        if (difference) {
            if (table) {
                out->classes[out->count] = (uint8_t)class;
                out->class_gaps[out->count] = (uint32_t)table->total[class] - out->next[class];
                out->next[class] = (uint32_t)table->total[class] + 1;
            }
            out->places[out->count] = (uint32_t)place;
            out->differences[out->count++] = difference;
        }
        if (table) table->total[class]++;
    }
    return out->count <= out->limit;
}

/* Apply the changes of all classes that are within the chunk's words. */
TARGET static void NAME(apply_classes)(uint8_t *chunk, size_t words, struct table *table,
                                       struct cursor *cursors) {
    for (size_t first = 0; first < words / BLOCK; first += TABLE) {
        /* Classes are those of the base's words, so all are read before a word of these blocks changes. */
        uint8_t *from = chunk + 2 * BLOCK * first;
        NAME(tabulate)(from, min_size(words / BLOCK - first, TABLE), table);
        for (unsigned class = 0; class < CLASSES; class++) {
            struct cursor at = cursors[class];
            while (at.rank < table->total[class]) {
                size_t block = 0;
                for (size_t step = TABLE / 2; step; step /= 2)
                    block += step * (table->seen[block + step][class] <= at.rank);
                unsigned before = (unsigned)(at.rank - table->seen[block][class]);
                unsigned bit = NAME(one_after)(table->masks[block][class], before);
                add_at(from, BLOCK * block + bit, *at.difference);
                next_change(&at);
            }
            cursors[class] = at;
        }
    }
    for (size_t place = words - words % BLOCK; place < words; place++) {
        unsigned class = class_of(word_at(chunk, place));
        if (table->total[class]++ == cursors[class].rank) {
            add_at(chunk, place, *cursors[class].difference);
            next_change(&cursors[class]);
        }
    }
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
