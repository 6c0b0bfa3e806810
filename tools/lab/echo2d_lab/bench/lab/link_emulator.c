/* Access links between network namespaces, in user space, for `netlab.py`. Linux; built with `cc -O2`.
 *
 *   link_emulator emulate FD...        node i is the i-th TUN device (IFF_TUN | IFF_NO_PI | IFF_VNET_HDR, TSO4)
 *   link_emulator exec PARENT PROGRAM  runs the program at NICE; it is killed when the process PARENT ends
 *
 *   node a --TUN--> [queue] uplink a --> delay a,b --> (loss?) [queue] downlink b --TUN--> node b
 *
 * Each link sends one packet after the other at its rate and drops packets for which its queue has no room (at the
 * tail). Loss is drawn per packet on the way into a node. The kernel hands over TCP in frames of up to 64 KiB (TSO);
 * they are judged segment by segment, and cut where a segment is lost. A packet counts with its Ethernet header.
 * Node i has the address 10.77.0.1 + i.
 *
 * Commands are lines on stdin, and each is answered with one line; the program ends at the end of stdin:
 *   node I UP DOWN QUEUE_S LOSS LATENCY_S CLOSED   bytes/s (0: no limit); CLOSED 1: no node can open TCP to it
 *   delay I J SECONDS                              one way from I to J; below 0: the sum of their latencies
 *   cut I J ON                                     1: nothing passes from I to J
 *   stats                                          one JSON object
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define NODES_MAX 256
#define PACKET_MAX (65536 + 64)
#define VNET ((int)sizeof(struct virtio_net_hdr))
#define ETHERNET 14
#define FIRST_ADDRESS 0x0A4D0001u
#define READS_MAX 16      /* packets taken from one node before the other nodes and the clock have their turn */
#define QUEUE_MIN 16384.0 /* bytes: a queue of only a few packets passes nothing */
#define PRIORITY 10       /* SCHED_FIFO: a late emulator sends packets in bursts, which overflow queues wrongly */
#define NICE (-10)        /* of programs, because other programs of the machine must not disturb their network */

struct link {
    double rate, queue_s; /* bytes/s, 0: no limit */
    int64_t free_at;
    uint64_t packets, bytes, payload, dropped;
};

struct node {
    int fd, closed;
    double loss;
    int64_t latency;
    struct link up, down;
    uint64_t lost;
};

/* data: the virtio header, then the IP packet. head: bytes of IP and TCP header. segments: packets on the wire. */
struct packet {
    int from, to, length, head, segments, segment_bytes;
    unsigned char data[];
};

struct event {
    int64_t at, first; /* first: when the first bit comes; only for arrivals */
    uint64_t number;
    int delivery; /* 0: arrives at the downlink; 1: has passed it */
    struct packet *packet;
};

static struct node nodes[NODES_MAX];
static int64_t delays[NODES_MAX][NODES_MAX];
static unsigned char cuts[NODES_MAX][NODES_MAX];
static int count, realtime;
static struct event *heap;
static size_t heap_count, heap_room;
static uint64_t events, chance = 0x9E3779B97F4A7C15ull;
static int64_t late_max;

static void die(const char *what) {
    fprintf(stderr, "link_emulator: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static double draw(void) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (double)(chance >> 11) * 0x1p-53;
}

/* --- events by time ---------------------------------------- */

static int sooner(const struct event *a, const struct event *b) {
    return a->at != b->at ? a->at < b->at : a->number < b->number;
}

static void push(struct event event) {
    if (heap_count == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) die("memory");
    }
    event.number = events++;
    size_t place = heap_count++;
    for (; place && sooner(&event, &heap[(place - 1) / 2]); place = (place - 1) / 2) heap[place] = heap[(place - 1) / 2];
    heap[place] = event;
}

static struct event pop(void) {
    struct event top = heap[0], last = heap[--heap_count];
    size_t place = 0, child;
    while ((child = 2 * place + 1) < heap_count) {
        if (child + 1 < heap_count && sooner(&heap[child + 1], &heap[child])) child++;
        if (!sooner(&heap[child], &last)) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = last;
    return top;
}

/* --- packets ---------------------------------------- */

static uint32_t get16(const unsigned char *p) { return (uint32_t)p[0] << 8 | p[1]; }
static uint32_t get32(const unsigned char *p) { return get16(p) << 16 | get16(p + 2); }
static void put16(unsigned char *p, uint32_t v) { p[0] = (unsigned char)(v >> 8), p[1] = (unsigned char)v; }
static void put32(unsigned char *p, uint32_t v) { put16(p, v >> 16), put16(p + 2, v & 0xffff); }

/* The Internet checksum's sum of an even number of bytes. */
static uint32_t sum(const unsigned char *p, int length, uint32_t start) {
    for (int i = 0; i < length; i += 2) start += get16(p + i);
    while (start >> 16) start = (start & 0xffff) + (start >> 16);
    return start;
}

static int payload_of(const struct packet *p) { return p->length - VNET - p->head; }

static int wire_of(const struct packet *p) { return payload_of(p) + p->segments * (p->head + ETHERNET); }

/* Finds the packet's target and its layout; 0 if the packet cannot be carried. */
static int dissect(struct packet *p) {
    const struct virtio_net_hdr *vnet = (const void *)p->data;
    const unsigned char *ip = p->data + VNET;
    int length = p->length - VNET, header = length < 20 ? 0 : (ip[0] & 15) * 4;
    if (length < 20 || ip[0] >> 4 != 4 || header < 20 || length < header) return 0;
    uint32_t to = get32(ip + 16) - FIRST_ADDRESS;
    if (to >= (uint32_t)count || (int)to == p->from) return 0;
    p->to = (int)to;
    p->head = header;
    p->segments = 1;
    if (ip[9] == 6 && length >= header + 20) p->head = header + (ip[header + 12] >> 4) * 4;
    if (p->head > length) return 0;
    if (vnet->gso_type != VIRTIO_NET_HDR_GSO_NONE) {
        if (!vnet->gso_size || ip[9] != 6) return 0;
        p->segment_bytes = vnet->gso_size;
        p->segments = (payload_of(p) + vnet->gso_size - 1) / vnet->gso_size;
    }
    return p->segments > 0;
}

static int opens(const struct packet *p) { /* a SYN without ACK */
    const unsigned char *ip = p->data + VNET;
    int header = (ip[0] & 15) * 4;
    return ip[9] == 6 && p->head > header && (ip[header + 13] & 0x12) == 0x02;
}

/* Segments [start, end) of a TSO frame as a packet of their own; the frame itself if that is all of it. */
static struct packet *part_of(struct packet *p, int start, int end) {
    if (start == 0 && end == p->segments) return p;
    int from = start * p->segment_bytes, size = payload_of(p) - from;
    if (size > (end - start) * p->segment_bytes) size = (end - start) * p->segment_bytes;
    struct packet *part = malloc(sizeof *part + (size_t)(VNET + p->head + size));
    if (!part) die("memory");
    *part = *p;
    part->segments = end - start;
    part->length = VNET + p->head + size;
    memcpy(part->data, p->data, (size_t)(VNET + p->head));
    memcpy(part->data + VNET + p->head, p->data + VNET + p->head + from, (size_t)size);
    struct virtio_net_hdr *vnet = (void *)part->data;
    if (part->segments == 1) vnet->gso_type = VIRTIO_NET_HDR_GSO_NONE, vnet->gso_size = 0;
    unsigned char *ip = part->data + VNET;
    int header = (ip[0] & 15) * 4;
    unsigned char *tcp = ip + header;
    put16(ip + 2, (uint32_t)(part->length - VNET));
    put16(ip + 4, get16(ip + 4) + (uint32_t)start);
    put16(ip + 10, 0);
    put16(ip + 10, ~sum(ip, header, 0));
    put32(tcp + 4, get32(tcp + 4) + (uint32_t)from);
    if (start > 0) tcp[13] &= 0x7f;                /* CWR belongs to the first segment ... */
    if (end < p->segments) tcp[13] &= 0xf6;        /* ... FIN and PSH to the last */
    if (vnet->flags & VIRTIO_NET_HDR_F_NEEDS_CSUM) /* the kernel wants the pseudo header's sum there */
        put16(tcp + 16, sum(ip + 12, 8, 6u + (uint32_t)(part->length - VNET - header)));
    return part;
}

/* --- links ---------------------------------------- */

/* The number of segments of the packet for which the link's queue has room now. */
static int room(const struct link *link, const struct packet *p, int64_t now) {
    if (link->rate <= 0) return p->segments;
    double limit = link->queue_s * link->rate, waiting = 0;
    if (limit < QUEUE_MIN) limit = QUEUE_MIN;
    if (link->free_at > now) waiting = (double)(link->free_at - now) * 1e-9 * link->rate;
    double fit = (limit - waiting) * p->segments / wire_of(p);
    return fit >= p->segments ? p->segments : fit <= 0 ? 0 : (int)fit;
}

/* The part of the packet for which the link's queue has room; NULL if it has none. */
static struct packet *queued(struct link *link, struct packet *p, int64_t now) {
    int fit = room(link, p, now);
    link->dropped += (uint64_t)(p->segments - fit);
    struct packet *kept = fit ? part_of(p, 0, fit) : NULL;
    if (kept != p) free(p);
    return kept;
}

/* The link sends the packet, the first bit not before `first`. Returns when the last bit has left. */
static int64_t send_over(struct link *link, const struct packet *p, int64_t first) {
    link->packets += (uint64_t)p->segments;
    link->bytes += (uint64_t)wire_of(p);
    link->payload += (uint64_t)payload_of(p);
    if (link->rate <= 0) return first;
    int64_t start = link->free_at > first ? link->free_at : first;
    return link->free_at = start + (int64_t)(wire_of(p) / link->rate * 1e9);
}

static void leave(struct packet *p, int64_t now) {
    struct link *up = &nodes[p->from].up;
    if (!dissect(p) || cuts[p->from][p->to] || (nodes[p->to].closed && opens(p))) {
        free(p);
        return;
    }
    if (!(p = queued(up, p, now))) return;
    int64_t delay = delays[p->from][p->to];
    if (delay < 0) delay = nodes[p->from].latency + nodes[p->to].latency;
    int64_t first = up->rate > 0 && up->free_at > now ? up->free_at : now;
    int64_t last = send_over(up, p, now);
    push((struct event){.at = last + delay, .first = first + delay, .packet = p});
}

static void enter(struct packet *p, int64_t first, int64_t now) {
    struct link *down = &nodes[p->to].down;
    if (!(p = queued(down, p, now))) return;
    int64_t end = send_over(down, p, first);
    push((struct event){.at = end > now ? end : now, .delivery = 1, .packet = p});
}

/* At the downlink: drops lost segments, and sends the rest of the packet. */
static void arrive(struct packet *p, int64_t first, int64_t now) {
    struct node *node = &nodes[p->to];
    if (cuts[p->from][p->to]) {
        free(p);
        return;
    }
    int start = 0;
    for (int i = 0; node->loss > 0 && i < p->segments; i++)
        if (draw() < node->loss) {
            if (start < i) enter(part_of(p, start, i), first, now);
            start = i + 1;
            node->lost++;
        }
    struct packet *rest = start < p->segments ? part_of(p, start, p->segments) : NULL;
    if (rest) enter(rest, first, now);
    if (rest != p) free(p);
}

static void deliver(struct packet *p) {
    if (!cuts[p->from][p->to] && write(nodes[p->to].fd, p->data, (size_t)p->length) < 0) nodes[p->to].lost++;
    free(p);
}

static void run_due(void) {
    int64_t now = now_ns();
    while (heap_count && heap[0].at <= now) {
        struct event event = pop();
        if (now - event.at > late_max) late_max = now - event.at;
        if (event.delivery)
            deliver(event.packet);
        else
            arrive(event.packet, event.first, event.at);
    }
}

static void take(int from) {
    static unsigned char buffer[PACKET_MAX];
    for (int i = 0; i < READS_MAX; i++) {
        ssize_t length = read(nodes[from].fd, buffer, sizeof buffer);
        if (length < VNET) return;
        struct packet *p = malloc(sizeof *p + (size_t)length);
        if (!p) die("memory");
        *p = (struct packet){.from = from, .length = (int)length};
        memcpy(p->data, buffer, (size_t)length);
        leave(p, now_ns());
    }
}

/* --- commands ---------------------------------------- */

static void print_link(const char *name, const struct link *link) {
    printf(",\"%s\":{\"packets\":%llu,\"bytes\":%llu,\"payload\":%llu,\"dropped\":%llu}", name,
           (unsigned long long)link->packets, (unsigned long long)link->bytes, (unsigned long long)link->payload,
           (unsigned long long)link->dropped);
}

static void print_stats(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
    cpu_s += (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    printf("{\"realtime\":%s,\"late_s_max\":%.6f,\"cpu_s\":%.3f,\"nodes\":[", realtime ? "true" : "false",
           (double)late_max * 1e-9, cpu_s);
    for (int i = 0; i < count; i++) {
        printf("%s{\"lost\":%llu", i ? "," : "", (unsigned long long)nodes[i].lost);
        print_link("up", &nodes[i].up);
        print_link("down", &nodes[i].down);
        printf("}");
    }
    puts("]}");
    late_max = 0;
}

static int is_node(int number) { return number >= 0 && number < count; }

static void obey(const char *line) {
    int one, other, flag;
    double up, down, queue_s, loss, seconds;
    if (!strcmp(line, "stats")) {
        print_stats();
    } else if (sscanf(line, "node %d %lf %lf %lf %lf %lf %d", &one, &up, &down, &queue_s, &loss, &seconds, &flag) == 7 &&
               is_node(one)) {
        struct node *node = &nodes[one];
        node->up.rate = up, node->down.rate = down;
        node->up.queue_s = node->down.queue_s = queue_s;
        node->loss = loss, node->latency = (int64_t)(seconds * 1e9), node->closed = flag;
        puts("ok");
    } else if (sscanf(line, "delay %d %d %lf", &one, &other, &seconds) == 3 && is_node(one) && is_node(other)) {
        delays[one][other] = seconds < 0 ? -1 : (int64_t)(seconds * 1e9);
        puts("ok");
    } else if (sscanf(line, "cut %d %d %d", &one, &other, &flag) == 3 && is_node(one) && is_node(other)) {
        cuts[one][other] = flag != 0;
        puts("ok");
    } else {
        printf("not understood: %s\n", line);
    }
    fflush(stdout);
}

/* Handles all whole lines of stdin; 0 at its end. */
static int read_commands(void) {
    static char text[4096];
    static size_t used;
    ssize_t length = read(0, text + used, sizeof text - 1 - used);
    if (length <= 0) return length < 0 && (errno == EAGAIN || errno == EINTR);
    used += (size_t)length;
    text[used] = 0;
    char *line = text, *end;
    while ((end = strchr(line, '\n'))) {
        *end = 0;
        obey(line);
        line = end + 1;
    }
    used -= (size_t)(line - text);
    memmove(text, line, used + 1);
    return used < sizeof text - 1;
}

/* --- programs ---------------------------------------- */

static int emulate(int argc, char **argv) {
    static struct pollfd fds[NODES_MAX + 1];
    struct sched_param fifo = {.sched_priority = PRIORITY};
    count = argc;
    realtime = sched_setscheduler(0, SCHED_FIFO, &fifo) == 0;
    prctl(PR_SET_TIMERSLACK, 1ul);
    mlockall(MCL_CURRENT);
    memset(delays, 0xff, sizeof delays);
    for (int i = 0; i < count; i++) {
        nodes[i].fd = atoi(argv[i]);
        if (fcntl(nodes[i].fd, F_SETFL, O_NONBLOCK) < 0) die("TUN device");
        fds[i + 1] = (struct pollfd){.fd = nodes[i].fd, .events = POLLIN};
    }
    fds[0].events = POLLIN;
    fcntl(0, F_SETFL, O_NONBLOCK);
    for (;;) {
        int64_t wait = heap_count ? heap[0].at - now_ns() : 1000000000;
        struct timespec timeout = {0};
        if (wait > 0) timeout.tv_sec = wait / 1000000000, timeout.tv_nsec = wait % 1000000000;
        if (ppoll(fds, (nfds_t)count + 1, &timeout, NULL) < 0) {
            if (errno != EINTR) die("poll");
            continue;
        }
        run_due();
        for (int i = 0; i < count; i++)
            if (fds[i + 1].revents & POLLIN) take(i);
        if (fds[0].revents && !read_commands()) return 0;
    }
}

/* With sched_autogroup, sessions compete with each other by a value of their own, and nice only within each. */
static void prioritize(void) {
    setpriority(PRIO_PROCESS, 0, NICE);
    FILE *group = fopen("/proc/self/autogroup", "w");
    if (group) fprintf(group, "%d", NICE), fclose(group);
}

int main(int argc, char **argv) {
    if (argc >= 2 && argc - 2 <= NODES_MAX && !strcmp(argv[1], "emulate")) return emulate(argc - 2, argv + 2);
    if (argc >= 4 && !strcmp(argv[1], "exec")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != (pid_t)atoi(argv[2])) return 1; /* it has ended already */
        prioritize();
        execvp(argv[3], argv + 3);
        die(argv[3]);
    }
    fputs("link_emulator emulate FD... | exec PARENT PROGRAM ARGUMENTS...; started by netlab.py\n", stderr);
    return 2;
}
