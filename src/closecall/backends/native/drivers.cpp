#include "drivers.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"
#include "tier.h"

#ifdef CLOSECALL_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef CLOSECALL_AMX
// Whether there is AMX for bfloat16, and Linux lets this process use it: tile registers are large, and kept for those who ask.
bool has_amx() {
  constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24;
  constexpr long ASK_FOR_FEATURE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16_BIT | TILE_BIT)) != (BF16_BIT | TILE_BIT)) return false;
  return syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_DATA) == 0;
}
#endif

const std::vector<const Kernels*>& tiers() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> list;
#ifdef CLOSECALL_X86
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#ifdef CLOSECALL_AMX
    if (bf16 && has_amx()) list.push_back(&amx_kernels);
#endif
    if (bf16) list.push_back(&avx512bf16_kernels);
    if (avx512) list.push_back(&avx512_kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      list.push_back(&avx2_kernels);
#endif
    list.push_back(&portable_kernels);
    return list;
  }();
  return found;
}

const Kernels* tier(int64_t index) { return index >= 0 && index < tier_count() ? tiers()[index] : nullptr; }

struct FreeAligned {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], FreeAligned>;

template <class T>
Buffer<T> buffer(int64_t n) {
  size_t bytes = (std::max<int64_t>(n, 1) * sizeof(T) + 63) / 64 * 64;
  void* p = std::aligned_alloc(64, bytes);
  if (!p) throw std::bad_alloc();
  return Buffer<T>((T*)p);
}

int64_t item_size(int64_t dtype) { return dtype == F32 ? 4 : 2; }
const char* at(const View& v, int64_t size, int64_t b, int64_t h, int64_t n) {
  return (const char*)v.data + (b * v.sb + h * v.sh + n * v.sn) * size;
}

struct Tile {
  int64_t b, t, row, rows, key, pos, sequence;
  int64_t end() const { return pos + rows; }
};

// Key n of the call, for one key head.
const char* key_at(const View& v, const Pages& pages, int64_t size, int64_t b, int64_t h, int64_t n) {
  return pages.table ? at(v, size, pages.table[n / pages.page], h, n % pages.page) : at(v, size, b, h, n);
}

std::vector<Tile> real_tiles(const Tiles& g, int64_t batch) {
  std::vector<Tile> list;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < g.count; ++t) {
      int64_t i = b * g.count + t;
      if (g.rows[i] > 0) list.push_back({b, t, g.row[i], g.rows[i], g.key[i], g.pos[i], g.sequence[i]});
    }
  return list;
}

// Whether all keys that the tiles see lie on pages that there are.
bool pages_are_sound(const Pages& p, const std::vector<Tile>& tiles, int64_t block) {
  if (!p.table) return true;
  if (p.page < 1 || p.page % block) return false;
  for (const Tile& tile : tiles) {
    int64_t first = tile.key / p.page, last = first + (tile.end() + p.page - 1) / p.page;
    if (tile.key % p.page || tile.key < 0 || last > p.entries) return false;
    for (int64_t i = first; i < last; ++i)
      if (p.table[i] < 0 || p.table[i] >= p.count) return false;
  }
  return true;
}
constexpr const char* BAD_PAGES = "the block table names pages that are not there";

// An attention item: a tile and the query heads it is computed for.
struct Item {
  Rows rows;
  double work;  // multiply-adds, roughly
  int64_t pieces;
};

Rows rows_of(const AttendArgs& a, const Tile& tile, int64_t head, int64_t heads) {
  const Shape& s = a.shape;
  int64_t size = item_size(s.dtype), shared = head / (s.H / s.Hkv);
  int64_t visible = (tile.end() + a.tiles.block - 1) / a.tiles.block;
  Rows r;
  r.q = at(a.q, size, tile.b, head, tile.row);
  r.q_row = a.q.sn, r.q_head = a.q.sh, r.q_dim = a.q.sd;
  r.rows = tile.rows, r.heads = heads, r.pos = tile.pos;
  bool paged = a.pages.table;
  r.k = at(a.k, size, paged ? 0 : tile.b, shared, paged ? 0 : tile.key), r.k_row = a.k.sn, r.k_dim = a.k.sd;
  r.v = at(a.v, size, paged ? 0 : tile.b, shared, paged ? 0 : tile.key), r.v_row = a.v.sn, r.v_dim = a.v.sd;
  r.pages = paged ? a.pages.table + tile.key / a.pages.page : nullptr;
  r.page = a.pages.page, r.k_page = a.k.sb, r.v_page = a.v.sb;
  r.idx = a.kv_idx ? a.kv_idx + tile.b * a.ib + head * a.ih + tile.t * a.it : nullptr;
  r.count = visible;
  if (r.idx) {
    int64_t count = a.counts[tile.b * a.cb + head * a.ch + tile.t * a.ct];
    if (count > a.width) r.idx = nullptr;  // more than a list holds: every visible block
    else r.count = std::min(count, visible);
  }
  r.block = a.tiles.block;
  r.out = (char*)at(a.out, size, tile.b, head, tile.row), r.out_row = a.out.sn, r.out_head = a.out.sh;
  r.lse = a.lse + (tile.b * s.H + head) * a.M + tile.row, r.lse_head = a.M;
  return r;
}

bool blocks_are_sound(const Rows& r) {
  if (!r.idx) return true;
  int64_t visible = (r.pos + r.rows + r.block - 1) / r.block, before = -1;
  for (int64_t i = 0; i < r.count; ++i) {
    if (r.idx[i] <= before || r.idx[i] >= visible) return false;
    before = r.idx[i];
  }
  return true;
}

// How many of `heads` heads to work on together: their packed queries and their outputs stay in cache beside keys and values.
constexpr int64_t HEADS_BYTES = 512 * 1024;

int64_t heads_in_cache(const Shape& s, int64_t heads) {
  int64_t most = std::max<int64_t>(1, HEADS_BYTES / (CHUNK * (s.D * item_size(s.dtype) + s.Dv * 4)));
  int64_t lots = (heads + most - 1) / most;
  return (heads + lots - 1) / lots;
}

// Below this many multiply-adds a second thread costs more than it brings.
constexpr double WORTH_A_THREAD = 2e6;
// Few rows wait for memory: each multiply-add takes as long as so many of a whole tile.
constexpr double FEW_TAKE = 16;

int64_t useful_threads(int64_t threads, double work) {
  return std::max<int64_t>(1, std::min<int64_t>(threads, (int64_t)(work / WORTH_A_THREAD)));
}

}  // namespace

int tier_count() { return (int)tiers().size(); }
const char* tier_name(int index) { return tiers()[index]->name; }

const char* run_attend(const AttendArgs& a) {
  const Kernels* kernels = tier(a.tier);
  if (!kernels) return "no such tier";
  const Shape& s = a.shape;
  int64_t group = s.H / s.Hkv;
  std::vector<Item> items;
  double work = 0;
  std::vector<Tile> tiles = real_tiles(a.tiles, s.B);
  if (!pages_are_sound(a.pages, tiles, a.tiles.block)) return BAD_PAGES;
  // Heads that keep the same blocks go together, as far as a core's cache holds their rows; heads that keep every block where
  // rows are few.
  int64_t sharing = heads_in_cache(s, a.kv_idx ? a.heads : group);
  if ((int64_t)tiles.size() * s.H < 4 * a.threads * sharing) sharing = 1;  // a head for every thread comes first
  for (const Tile& tile : tiles) {
    bool few = tile.rows <= FEW_ROWS;
    int64_t most = few ? (a.kv_idx ? a.heads : group) : sharing, together = most;
    for (int64_t h = 0; h < s.H; h += together) {
      together = std::min(most, group - h % group);
      Item item{rows_of(a, tile, h, together), 0, 0};
      if (!blocks_are_sound(item.rows)) return "the selection changed while it was used";
      double keys = std::min<double>((double)item.rows.count * a.tiles.block, (double)tile.end());
      item.work = keys * (double)(tile.rows * together) * (double)(s.D + s.Dv) * (few ? FEW_TAKE : 1);
      int64_t per_piece = std::max<int64_t>(1, PIECE / a.tiles.block);
      if (few) item.pieces = (item.rows.count + per_piece - 1) / per_piece;
      work += item.work;
      items.push_back(item);
    }
  }
  int64_t threads = useful_threads(a.threads, work);
  // The pieces of an item that is much of the work (decode) are shared out, in runs: who goes on from piece to piece has asked
  // for the next one's keys and values in time. Else an item is one thread's.
  double share = std::max(1.0, threads > 1 ? work / (4.0 * (double)threads) : work);
  struct Job { int64_t item, first, last; };
  std::vector<Job> jobs;
  std::vector<Buffer<float>> partial(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    int64_t pieces = items[i].pieces, runs = std::max<int64_t>(1, std::min(pieces, (int64_t)std::lround(items[i].work / share)));
    if (runs > 1) partial[i] = buffer<float>(pieces * kernels->few_partial(s, items[i].rows));
    for (int64_t r = 0; r < runs; ++r) jobs.push_back({(int64_t)i, pieces * r / runs, pieces * (r + 1) / runs});
  }
  // Longest first keeps the threads busy to the end; the order of equal ones keeps neighbours' keys in cache.
  if (threads > 1)
    std::stable_sort(jobs.begin(), jobs.end(), [&](const Job& x, const Job& y) { return items[x.item].work > items[y.item].work; });
  int64_t scratch_bytes = std::max(kernels->attend_scratch(s, sharing), kernels->few_scratch(s));
  std::vector<Buffer<char>> scratch;
  for (int64_t w = 0; w < threads; ++w) scratch.push_back(buffer<char>(scratch_bytes));
  parallel_for((int64_t)jobs.size(), threads, [&](int64_t j, int64_t worker) {
    const Job& job = jobs[j];
    const Item& item = items[job.item];
    char* mine = scratch[worker].get();
    if (item.rows.rows > FEW_ROWS) return kernels->attend(a, item.rows, mine);
    if (partial[job.item]) return kernels->attend_few(a, item.rows, job.first, job.last, partial[job.item].get(), mine);
    Buffer<float> own = buffer<float>(std::max<int64_t>(1, item.pieces) * kernels->few_partial(s, item.rows));
    kernels->attend_few(a, item.rows, 0, item.pieces, own.get(), mine);
    kernels->merge_few(a, item.rows, item.pieces, own.get());
  });
  for (size_t i = 0; i < items.size(); ++i)
    if (partial[i]) kernels->merge_few(a, items[i].rows, items[i].pieces, partial[i].get());
  return nullptr;
}

int64_t run_summary_bytes(const RankArgs& a) {
  const Kernels* kernels = tier(a.tier);
  return kernels ? kernels->summary_bytes(a) : 0;
}

namespace {

// A sequence of a call: its keys, the position of its first row, and the place of its first block's summary.
struct Sequence { int64_t b, key, keys, first, place; };

struct Summarised {
  std::vector<Sequence> sequences;
  std::vector<int64_t> sequence_of;  // of each tile
  int64_t blocks = 0;                // of all sequences
  Buffer<char> own;                  // [Hkv, blocks], where nothing is kept row by row
};

void find_sequences(const std::vector<Tile>& tiles, int64_t block, Summarised& found) {
  found.sequence_of.resize(tiles.size());
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    if (i == 0 || tiles[i - 1].sequence != tile.sequence) found.sequences.push_back({tile.b, tile.key, 0, tile.pos, 0});
    found.sequences.back().keys = tile.end();
    found.sequence_of[i] = (int64_t)found.sequences.size() - 1;
  }
  for (Sequence& q : found.sequences) {
    q.place = found.blocks;
    found.blocks += (q.keys + block - 1) / block;
  }
}

// Summaries kept in pages: of a block that is complete before the first row they are there already; of one that a row of
// this call completed they are written.
char* in_page(const RankArgs& a, int64_t bytes, const Sequence& q, int64_t head, int64_t b) {
  int64_t key = q.key + b * a.tiles.block, per_page = a.pages.page / a.tiles.block;
  int64_t page = a.pages.table[key / a.pages.page], within = key % a.pages.page / a.tiles.block;
  return a.kept + ((page * a.shape.Hkv + head) * per_page + within) * bytes;
}

// Every block from from(sequence) on is given to make(sequence, head, block, its keys), a few at a time to each thread.
template <class From, class Make>
void each_block(const RankArgs& a, const std::vector<Sequence>& sequences, From from, Make make) {
  const Shape& s = a.shape;
  int64_t block = a.tiles.block;
  struct Piece { int64_t sequence, head, first, last; };
  std::vector<Piece> pieces;
  double work = 0;
  for (size_t q = 0; q < sequences.size(); ++q) {
    int64_t first = from(sequences[q]), n = (sequences[q].keys + block - 1) / block;
    for (int64_t h = 0; h < s.Hkv; ++h)
      for (int64_t b = first; b < n; b += 32) pieces.push_back({(int64_t)q, h, b, std::min(b + 32, n)});
    work += (double)(sequences[q].keys - first * block) * (double)(s.Hkv * s.D);
  }
  parallel_for((int64_t)pieces.size(), useful_threads(a.threads, work), [&](int64_t i, int64_t) {
    const Piece& p = pieces[i];
    const Sequence& q = sequences[p.sequence];
    for (int64_t b = p.first; b < p.last; ++b) make(q, p.head, b, std::min(block, q.keys - b * block));
  });
}

}  // namespace

const char* run_update(const RankArgs& a) {
  const Kernels* kernels = tier(a.tier);
  if (!kernels) return "no such tier";
  if (!a.pages.table || !a.kept) return "only summaries in pages are updated by themselves";
  int64_t size = item_size(a.shape.dtype), block = a.tiles.block, bytes = kernels->summary_bytes(a);
  std::vector<Tile> tiles = real_tiles(a.tiles, a.shape.B);
  if (!pages_are_sound(a.pages, tiles, block)) return BAD_PAGES;
  Summarised found;
  find_sequences(tiles, block, found);
  auto from = [&](const Sequence& q) { return q.first / block; };
  each_block(a, found.sequences, from, [&](const Sequence& q, int64_t head, int64_t b, int64_t n) {
    if (n < block) return;
    kernels->summarise(a, key_at(a.k, a.pages, size, q.b, head, q.key + b * block), n, in_page(a, bytes, q, head, b));
  });
  return nullptr;
}

namespace {

// Tiles of so many rows are ranked many at a time, even where each row is scored.
constexpr int64_t FEW_RUNS = 16;

// Who decides: query heads, or those of a key head together.
int64_t deciding(const RankArgs& a) { return a.shape.H / a.heads; }

// A tile of the one who decides, and where its ranking goes.
Cell cell_of(const RankArgs& a, const Tile& tile, int64_t one) {
  const Shape& s = a.shape;
  int64_t own = tile.pos / a.tiles.block, head = one * a.heads, i = tile.b * a.tiles.count + tile.t;
  int64_t out = ((tile.b * deciding(a) + one) * a.tiles.count + tile.t) * a.width;
  Cell cell;
  cell.q = at(a.q, item_size(s.dtype), tile.b, head, tile.row), cell.rows = tile.rows;
  cell.forced = a.forced ? a.forced + (tile.b * s.H + head) * a.M + tile.row : nullptr;
  cell.low = std::min(a.sinks, own), cell.high = own, cell.seen = (tile.end() + a.tiles.block - 1) / a.tiles.block;
  cell.want = a.limits ? a.limits[i] : a.width;
  cell.order = a.order + out, cell.scores = a.scores + out;
  return cell;
}

// Whether cells can be ranked many at a time: tiles of means, and small tiles, whose rows would leave most lanes empty.
bool cells_pay(const RankArgs& a) { return a.pool > 1 || a.runs <= FEW_RUNS; }

bool in_cells(const RankArgs& a, const Tile& tile) {
  if (a.pool == 1) return cells_pay(a) && 2 * tile.rows > a.runs;  // the few rows of a decoding step are no tile of that size
  return !(a.every_row && a.every_row[tile.b * a.tiles.count + tile.t]);
}

void rank_one(const Kernels& kernels, const RankArgs& a, const Cell& c, const char* summaries, const int32_t* blocks, char* memory) {
  kernels.rank(a, c.q, c.rows, c.forced, summaries, blocks, c.low, c.high, c.seen, c.want, c.order, c.scores, memory);
}

// A worker's room for cells whose best blocks are scored again.
struct Again {
  RankArgs wide, near;  // the first ranking goes as far as candidates do; the second is of every row, and of few blocks
  Buffer<char> copies;
  Buffer<int32_t> order, blocks;
  Buffer<float> scores;
  Again(const Kernels& kernels, const RankArgs& a, const std::vector<Tile>& tiles) : wide(a), near(a) {
    int64_t own = 0;
    for (const Tile& tile : tiles) own = std::max(own, (tile.end() + a.tiles.block - 1) / a.tiles.block - tile.pos / a.tiles.block);
    wide.width = a.candidates;
    near.pool = 1, near.outlying = 0;
    near.tiles.n_blocks = std::min(a.tiles.n_blocks, a.sinks + a.candidates + own);
    copies = buffer<char>(kernels.names_blocks(a) ? 0 : near.tiles.n_blocks * kernels.summary_bytes(a));
    blocks = buffer<int32_t>(near.tiles.n_blocks);
    order = buffer<int32_t>(MOST_CELLS * a.candidates);
    scores = buffer<float>(MOST_CELLS * a.candidates);
  }
};

// Ranks cells by means, then the best blocks of each by every row: they and its forced blocks are named in ascending order, or
// their summaries copied into one piece, and ranked as if there were no others.
void rank_again(const Kernels& kernels, const Cell* cells, int64_t n, const char* summaries, Again& room, char* memory) {
  int64_t listed = room.wide.width, bytes = kernels.summary_bytes(room.wide), all = room.wide.tiles.n_blocks;
  Cell first[MOST_CELLS];
  for (int64_t c = 0; c < n; ++c) {
    first[c] = cells[c];
    first[c].ascending = true, first[c].want = listed, first[c].order = room.order.get() + c * listed, first[c].scores = room.scores.get() + c * listed;
  }
  kernels.rank_cells(room.wide, first, n, summaries, memory);
  for (int64_t c = 0; c < n; ++c) {
    int32_t* blocks = room.blocks.get();
    int64_t count = 0;
    for (int64_t b = 0; b < cells[c].low; ++b) blocks[count++] = (int32_t)b;
    for (int64_t i = 0; i < listed && first[c].order[i] < all; ++i) blocks[count++] = first[c].order[i];
    Cell cell = cells[c];
    cell.high = count;
    for (int64_t b = cells[c].high; b < cells[c].seen; ++b) blocks[count++] = (int32_t)b;
    cell.seen = count;
    if (kernels.names_blocks(room.near)) {
      rank_one(kernels, room.near, cell, summaries, blocks, memory);
    } else {
      for (int64_t b = 0; b < count; ++b) std::memcpy(room.copies.get() + b * bytes, summaries + blocks[b] * bytes, bytes);
      rank_one(kernels, room.near, cell, room.copies.get(), nullptr, memory);
    }
    for (int64_t i = 0; i < room.near.width; ++i) cell.order[i] = cell.order[i] < count ? blocks[cell.order[i]] : (int32_t)all;
  }
}

// Ranks the blocks that each tile sees. `summaries(key head, tile)` says where those of its sequence begin.
template <class Summaries>
void rank_tiles(const Kernels& kernels, const RankArgs& a, const std::vector<Tile>& tiles, Summaries summaries) {
  // A tile whose rows are scored one by one is an item for each who decides. Of the others, as many neighbouring tiles of a
  // sequence as the kernel ranks together are one for each key head and group of deciding heads.
  struct Ranking { int64_t first, last, head, heads; bool many; };
  std::vector<Ranking> items;
  int64_t all = deciding(a), group = all / a.shape.Hkv;
  int64_t together = cells_pay(a) ? kernels.cells_at_once(a) : 1, heads = std::min(group, together);
  double work = 0;
  // Later tiles see more blocks: they go first, so that no thread is left with a long one at the end.
  for (int64_t last = (int64_t)tiles.size(), first; last > 0; last = first) {
    const Tile& tile = tiles[last - 1];
    first = last - 1;
    bool many = in_cells(a, tile);
    while (many && first > 0 && (last - first + 1) * heads <= together && in_cells(a, tiles[first - 1]) &&
           tiles[first - 1].sequence == tile.sequence)
      --first;
    for (int64_t h = 0; h < all; h += many ? std::min(heads, group - h % group) : 1)
      items.push_back({first, last, h, many ? std::min(heads, group - h % group) : 1, many});
    int64_t rows = many ? (tile.rows + a.pool - 1) / a.pool + a.outlying : std::max<int64_t>(tile.rows, 16);
    work += (double)(last - first) * (double)(tile.end() / a.tiles.block * rows + a.candidates * tile.rows) * (double)(a.shape.D * a.shape.H);
  }
  int64_t threads = useful_threads(a.threads, work);
  std::vector<Buffer<char>> memory;
  std::vector<Again> again;
  for (int64_t w = 0; w < threads; ++w) {
    if (a.candidates) again.emplace_back(kernels, a, tiles);
    int64_t bytes = kernels.rank_scratch(a);  // of fewer blocks it is smaller
    if (cells_pay(a)) bytes = std::max(bytes, kernels.cells_scratch(a.candidates ? again.back().wide : a));
    memory.push_back(buffer<char>(bytes));
  }
  parallel_for((int64_t)items.size(), threads, [&](int64_t i, int64_t worker) {
    const Ranking& item = items[i];
    const char* from = summaries(item.head / group, item.first);
    if (!item.many) return rank_one(kernels, a, cell_of(a, tiles[item.first], item.head), from, nullptr, memory[worker].get());
    Cell cells[MOST_CELLS];
    int64_t n = 0;
    for (int64_t t = item.first; t < item.last; ++t)
      for (int64_t h = item.head; h < item.head + item.heads; ++h) cells[n++] = cell_of(a, tiles[t], h);
    if (a.candidates) return rank_again(kernels, cells, n, from, again[worker], memory[worker].get());
    kernels.rank_cells(a, cells, n, from, memory[worker].get());
  });
}

}  // namespace

const char* run_rank(const RankArgs& a) {
  const Kernels* kernels = tier(a.tier);
  if (!kernels) return "no such tier";
  const Shape& s = a.shape;
  int64_t size = item_size(s.dtype), block = a.tiles.block, bytes = kernels->summary_bytes(a);
  std::vector<Tile> tiles = real_tiles(a.tiles, s.B);
  if (!pages_are_sound(a.pages, tiles, block)) return BAD_PAGES;
  Summarised found;
  find_sequences(tiles, block, found);
  const std::vector<Sequence>& sequences = found.sequences;
  const std::vector<int64_t>& sequence_of = found.sequence_of;
  bool in_pages = a.kept && a.pages.table, in_rows = a.kept && !in_pages;
  if (in_rows)
    for (const Sequence& q : sequences)
      if (q.key != 0 || (q.keys + block - 1) / block > a.room || a.done < 0 || a.done > q.keys / block)
        return "the kept summaries do not fit";
  found.own = buffer<char>(in_rows ? 0 : found.blocks * s.Hkv * bytes);
  auto summary = [&](int64_t head, const Sequence& q, int64_t b) {
    return in_rows ? a.kept + ((q.b * s.Hkv + head) * a.room + b) * bytes
                   : found.own.get() + (head * found.blocks + q.place + b) * bytes;
  };
  auto from = [&](const Sequence&) { return in_rows ? a.done : 0; };
  each_block(a, sequences, from, [&](const Sequence& q, int64_t head, int64_t b, int64_t n) {
    char* to = summary(head, q, b);
    if (in_pages && b < q.first / block) {
      std::memcpy(to, in_page(a, bytes, q, head, b), bytes);
      return;
    }
    kernels->summarise(a, key_at(a.k, a.pages, size, q.b, head, q.key + b * block), n, to);
    if (in_pages && n == block) std::memcpy(in_page(a, bytes, q, head, b), to, bytes);
  });

  auto first_summary = [&](int64_t head, int64_t tile) -> const char* { return summary(head, sequences[sequence_of[tile]], 0); };
  rank_tiles(*kernels, a, tiles, first_summary);
  return nullptr;
}

const char* run_gather(const GatherArgs& a) {
  const Tiles& g = a.tiles;
  std::vector<uint64_t> kept((g.n_blocks + 63) / 64);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t t = 0; t < g.count; ++t) {
        int64_t cell = (b * a.H + h) * g.count + t, i = b * g.count + t, found = 0;
        int32_t* out = a.kv_idx + cell * a.width;
        if (g.rows[i] > 0) {
          int64_t own = g.pos[i] / g.block, visible = (g.pos[i] + g.rows[i] + g.block - 1) / g.block;
          int64_t count = a.counts[b * a.cb + h * a.ch + t * a.ct];
          int64_t sinks = std::min(a.sinks, own), left = count - sinks - (visible - own);
          if (count > a.width)  // every visible block: the first of them
            while (found < a.width) { out[found] = (int32_t)found; ++found; }
          std::fill(kept.begin(), kept.end(), 0);
          auto keep = [&](int64_t x) { kept[x / 64] |= 1ull << (x % 64); };
          for (int64_t x = 0; x < sinks; ++x) keep(x);
          for (int64_t x = own; x < visible; ++x) keep(x);
          for (int64_t r = 0; r < std::min(left, a.order_width); ++r) {
            int32_t x = a.order[cell * a.order_width + r];
            if (x >= 0 && x < visible) keep(x);
          }
          for (size_t w = 0; w < kept.size(); ++w)
            for (uint64_t bits = kept[w]; bits && found < a.width; bits &= bits - 1)
              out[found++] = (int32_t)(w * 64 + __builtin_ctzll(bits));
        }
        std::fill(out + found, out + a.width, (int32_t)g.n_blocks);
      }
  return nullptr;
}

double run_peak(int64_t index, int64_t dtype, double seconds) {
  const Kernels* kernels = tier(index);
  return kernels ? kernels->peak(dtype, seconds) : 0.0;
}
