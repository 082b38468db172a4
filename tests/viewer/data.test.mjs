// The page's numbers against loops over a matrix that is made here, and its state against itself after a reload.
//   node --test tests/viewer/
import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";

const source = (name) => import(new URL(`../../attnscope/viewer/src/${name}.js`, import.meta.url));
const { Blobs, Page, WeightMap, exactly, massOn, said } = await source("data");
const { DEFAULTS, Store, parse, write } = await source("store");
const { find } = await source("dialogs");
const { leastOf, sliderOf } = await source("filters");
const { css, diverging, inkOn, intensity, luminance, sequential, srgb } = await source("colours");
const { pool } = await source("thumbs");
const { isolated } = await source("escaping");
const { numbers } = await source("views/arithmetic");
const { inOrder, kindOf, namedTokens, plus } = await source("views/cuts");
const { scaleOf } = await source("views/curve");
const { digits } = await source("scales");

const LABELS = ["<s>", "the", "·fin", "ancial", "·bank", "·on"];
const PLAIN = ["<s>", "the", " fin", "ancial", " bank", " on"];
const WORDS = [[1, 2, "the"], [2, 4, "financial"], [4, 5, "bank"], [5, 6, "on"]];
const TOKENS = LABELS.length;
const FIRST = [0, 0, 0, 1, 2, 3]; // of a window of three
const SCALE = 1 / 255;

/** One number for each visible pair, none of which is like another's. */
const stored = (at, head, q, k) => (q === 0 ? 255 : (7 * q + 13 * k + 31 * head + 50 * at) % 90);
const weight = (at, head, q, k) => (k <= q ? stored(at, head, q, k) * SCALE : 0);

function pageOf(change = {}) {
  const heads = [[0, 0], [0, 1], [1, 0]];
  const bytes = [];
  const maps = heads.map(([at, head]) => {
    while (bytes.length % 4) bytes.push(0);
    const offset = bytes.length;
    for (let q = 0; q < TOKENS; q++) for (let k = 0; k <= q; k++) bytes.push(stored(at, head, q, k));
    return { at, head, rows: TOKENS, columns: TOKENS, bin: 1, scale: SCALE, bits: 8, triangle: true, blob: 0, offset };
  });
  const side = {
    name: "one", model: {}, engine: "eager", text: PLAIN.join(""),
    tokens: { text: PLAIN, label: LABELS, plain: PLAIN, id: [], special: [1, 0, 0, 0, 0, 0], start: [], stop: [] },
    words: WORDS, sentences: [], turns: [], answer: 4,
    layers: [{ layer: 0 }, { layer: 1 }], metrics: [{ id: "focus" }],
    heads: heads.map(([at, head]) => ({ at, head, role: "-", top_key: 4, top_key_mass: head ? 0.5 : 0.1, scores: [0] })),
    maps, relations: null, steps: null, first: [null, null],
    ...change,
  };
  const unpacked = change.blobs ?? [Uint8Array.from(bytes)];
  const blobs = new Blobs((blob) => deflateRawSync(unpacked[blob]).toString("base64"));
  return new Page({ sides: [side], units: null, defined: {}, asked: { query: null, key: null }, left_out: [] }, blobs);
}

const near = (found, wanted) => {
  assert.equal(found.length, wanted.length);
  found.forEach((value, i) => assert.ok(Math.abs(value - wanted[i]) < 1e-6, `${i}: ${value}, not ${wanted[i]}`));
};

test("numbers of a column have as many digits: those after the point are kept where they are 0", () => {
  const shown = [0.98, 0.971, 0.0204, 1.1, 22.46, 2.4, 0.00001, -0.5, 0, 1, 12, 1234.5].map(digits);
  const wanted = ["0.980", "0.971", "0.020", "1.10", "22.5", "2.40", "<0.001", "−0.500", "0", "1", "12", "1230"];
  assert.deepEqual(shown, wanted);
});

const range = (count) => [...Array(count).keys()];

test("the edge of a window is left of the first key that each query sees, and between those of two queries", async () => {
  const first = [0, 0, 0, 1, 1, 3];
  const page = pageOf({ layers: [{ layer: 0, visible: "window 3" }, { layer: 1, visible: "full" }] });
  const side = page.sides[0];
  const grid = await page.filteredMap(0, 1, 0, { ...DEFAULTS });
  assert.deepEqual(grid.edges(false), []);
  for (const q of range(TOKENS)) for (const k of range(first[q])) grid.values[q * TOKENS + k] = NaN;
  const expected = [[3, 1, 4, 1], [3, 0, 3, 1], [4, 1, 5, 1], [5, 3, 6, 3], [5, 1, 5, 3]];
  assert.deepEqual(grid.edges(false), expected);
  assert.equal(side.window(0), "window");
  assert.equal(side.window(1), "");
});

test("the edge of a window to both sides is right of the last keys too", async () => {
  const page = pageOf();
  const grid = await page.filteredMap(0, 1, 0, { ...DEFAULTS });
  for (const q of range(TOKENS)) for (const k of range(TOKENS)) grid.values[q * TOKENS + k] = Math.abs(q - k) > 1 ? NaN : 1;
  const sides = range(TOKENS).map((q) => [Math.max(0, q - 1), Math.min(TOKENS, q + 2)]);
  const down = grid.edges(true).filter(([top, , bottom]) => bottom > top);
  const expected = sides.flatMap(([left, right], q) => [left, right].filter((at) => at > 0 && at < TOKENS).map((at) => [q, at, q + 1, at]));
  assert.deepEqual(down.map(String).sort(), expected.map(String).sort());
});

test("a map is what was stored, in rows, columns and single weights", async () => {
  const map = await pageOf().sides[0].map(1, 0);
  for (const q of range(TOKENS)) {
    near(map.row(q), range(TOKENS).map((k) => weight(1, 0, q, k)));
    near(map.column(q), range(TOKENS).map((row) => weight(1, 0, row, q)));
    for (const k of range(TOKENS)) {
      near([map.at(q, k)], [weight(1, 0, q, k)]);
      assert.equal(map.visible(q, k), k <= q);
    }
  }
});

test("two bytes for each weight, and a rectangle", () => {
  const numbers = Uint16Array.from(range(12), (i) => 5000 * i);
  const entry = { rows: 3, columns: 4, bin: 1, scale: 2 / 65535, bits: 16, triangle: false, offset: 0 };
  const map = new WeightMap(entry, numbers.buffer, null, 4);
  near(map.row(2), [8, 9, 10, 11].map((i) => (5000 * i * 2) / 65535));
});

test("a blob is unpacked once, and only when it is asked for", async () => {
  const page = pageOf();
  let reads = 0;
  const { read } = page.blobs;
  page.blobs.read = (blob) => (reads++, read(blob));
  assert.equal(reads, 0);
  await Promise.all([page.sides[0].map(0, 0), page.sides[0].map(1, 0), page.sides[0].row(0, 1, 3)]);
  assert.equal(reads, 1);
});

test("without filters a look is the row; what filters take out is counted", async () => {
  const page = pageOf();
  const look = await page.filtered(0, 0, 1, 5, DEFAULTS);
  near(look.weights, range(TOKENS).map((k) => weight(0, 1, 5, k)));
  assert.equal(look.removed, 0);
  const sum = (keys) => keys.reduce((total, k) => total + weight(0, 1, 5, k), 0);
  for (const [change, gone] of [
    [{ special: false }, [0]],
    [{ sink: false }, [4]], // half of the mass rests on token 4
    [{ part: "prompt" }, [4, 5]],
    [{ part: "answer" }, [0, 1, 2, 3]],
    [{ sink: false, special: false }, [0, 4]],
  ]) {
    const less = await page.filtered(0, 0, 1, 5, { ...DEFAULTS, ...change });
    near(less.weights, range(TOKENS).map((k) => (gone.includes(k) ? 0 : weight(0, 1, 5, k))));
    near([less.removed], [sum(gone)]);
  }
  const sink = await page.filtered(0, 0, 0, 5, { ...DEFAULTS, sink: false });
  assert.equal(sink.weights[0], 0); // its top key has a tenth of the mass: it rests on none, so key 0 it is
  assert.ok(sink.weights[4] > 0);
});

test("of a pair of texts queries of one and keys of one are left", async () => {
  const page = pageOf({ pair: 3, answer: null });
  const texts = { a: [0, 3], b: [3, 6] };
  for (const pair of ["ab", "ba", "aa", "bb"]) {
    const [queries, keys] = [...pair].map((text) => texts[text]);
    const state = page.clean({ ...DEFAULTS, pair, query: 0, key: 5 });
    assert.deepEqual([state.query, state.key], [pair[0] === "a" ? 0 : null, pair[1] === "b" ? 5 : null]);
    const grid = await page.filteredMap(0, 0, 1, state);
    assert.deepEqual([grid.rows, grid.columns], [3, 3]);
    for (const row of range(3)) {
      const query = queries[0] + row;
      const among = (k) => k >= keys[0] && k < keys[1];
      near([...grid.row(row)].map((value) => value || 0), range(3).map((k) => weight(0, 1, query, keys[0] + k)));
      const look = await page.filtered(0, 0, 1, query, state);
      near(look.weights, range(TOKENS).map((k) => (among(k) ? weight(0, 1, query, k) : 0)));
      near([look.removed], [range(TOKENS).reduce((sum, k) => sum + (among(k) ? 0 : weight(0, 1, query, k)), 0)]);
    }
    const column = await page.filteredColumn(0, 0, 1, [keys[0], keys[0] + 1], state);
    near(column.weights, range(TOKENS).map((q) => (q >= queries[0] && q < queries[1] ? weight(0, 1, q, keys[0]) : 0)));
    const last = page.query({ ...state, query: null });
    assert.ok(last >= queries[0] && last < queries[1]);
  }
  assert.equal(pageOf().clean({ ...DEFAULTS, pair: "ab" }).pair, "all");
});

test("the lines of a long text leave out the key that a head rests on, where nobody chose", () => {
  const side = pageOf().sides[0];
  const lines = { ...DEFAULTS, view: "head" };
  assert.equal(side.withoutSink(0, 1, lines), false); // few lines hide nothing
  side.count = 21;
  for (const [head, state, expected] of [
    [1, lines, true],
    [0, lines, false], // rests on none
    [1, { ...lines, key: 4 }, false],
    [1, { ...lines, key: 3 }, true],
    [1, { ...lines, sink: true }, false],
    [1, DEFAULTS, false],
    [0, { ...DEFAULTS, sink: false }, true],
  ])
    assert.equal(side.withoutSink(0, head, state), expected);
});

test("the least weight goes by what is drawn", async () => {
  const least = 0.2;
  const look = await pageOf().filtered(0, 0, 0, 4, { ...DEFAULTS, least });
  const row = range(TOKENS).map((k) => weight(0, 0, 4, k));
  near(look.weights, row.map((one) => (one < least ? 0 : one)));
  near([look.removed], [row.reduce((total, one) => total + (one < least ? one : 0), 0)]);
});

test("words: sum over keys, mean over queries", async () => {
  const page = pageOf();
  const words = { ...DEFAULTS, words: true };
  const bounds = [[0, 1], [1, 2], [2, 4], [4, 5], [5, 6]]; // the special token stands alone
  const mean = (queries, keys) => {
    let total = 0;
    for (let q = queries[0]; q < queries[1]; q++) for (let k = keys[0]; k < keys[1]; k++) total += weight(0, 0, q, k);
    return total / (queries[1] - queries[0]);
  };
  const look = await page.filtered(0, 0, 0, 3, words);
  assert.deepEqual(look.units.label, ["<s>", "the", "·financial", "·bank", "·on"]);
  near(look.weights, bounds.map((keys) => mean([2, 4], keys)));
  assert.deepEqual(range(5).map(look.visible), [true, true, true, false, false]);
  const column = await page.filteredColumn(0, 0, 0, [2, 3], words);
  near(column.weights, bounds.map((queries) => mean(queries, [2, 4])));
  const grid = await page.filteredMap(0, 0, 0, words);
  bounds.forEach((queries, q) =>
    bounds.forEach((keys, k) => {
      assert.equal(grid.visible(q, k), k <= q);
      near([grid.at(q, k)], [mean(queries, keys)]);
    }),
  );
});

test("who looks at a key, and at a span of keys", async () => {
  const page = pageOf();
  const column = await page.filteredColumn(0, 1, 0, [2, 4], DEFAULTS);
  near(column.weights, range(TOKENS).map((q) => weight(1, 0, q, 2) + weight(1, 0, q, 3)));
  assert.deepEqual(range(TOKENS).map(column.visible), range(TOKENS).map((q) => q >= 2));
});

test("a mean over a layer, and over all heads", async () => {
  const page = pageOf();
  const heads = [[0, 0], [0, 1], [1, 0]];
  const mean = (some, q, k) => some.reduce((total, [at, head]) => total + weight(at, head, q, k), 0) / some.length;
  const all = await page.look(0, { ...DEFAULTS, over: "all" }, 4);
  near(all.weights, range(TOKENS).map((k) => mean(heads, 4, k)));
  const layer = await page.look(0, { ...DEFAULTS, over: "layer", from: "key" }, 2);
  near(layer.weights, range(TOKENS).map((q) => mean(heads.slice(0, 2), q, 2)));
});

test("a group of keys is all of its places, each counted once, until another key is chosen", async () => {
  const page = pageOf();
  page.data.defined = { who: { positions: [1, 2, 4] } };
  const state = page.clean({ ...DEFAULTS, key: 1, group: "who" });
  assert.deepEqual(page.places(state), [[1, 3], [4, 5]]);
  const mass = massOn(await page.filtered(0, 0, 0, 5, state), page.places(state));
  near([mass], [[1, 2, 4].reduce((sum, k) => sum + weight(0, 0, 5, k), 0)]);
  near([await page.uniform(0, 0, 5, page.places(state), state)], [3 / 6]);
  const words = { ...state, words: true }; // token 2 brings the rest of its word
  near([massOn(await page.filtered(0, 0, 0, 5, words), page.places(words))], [[1, 2, 3, 4].reduce((sum, k) => sum + weight(0, 0, 5, k), 0)]);
  near([await page.uniform(0, 0, 5, page.places(words), words)], [4 / 6]);
  for (const change of [{ key: 2 }, { key: null }, { group: "else" }]) assert.equal(page.clean({ ...state, ...change }).group, "");
});

test("a window: what is visible, and the uniform share", async () => {
  const first = Buffer.from(Int32Array.from(FIRST).buffer);
  const plain = pageOf();
  const maps = await plain.blobs.get(0);
  const page = pageOf({ blobs: [Buffer.from(maps), first], first: [{ blob: 1, offset: 0 }, null] });
  const map = await page.sides[0].map(0, 0);
  for (const q of range(TOKENS)) for (const k of range(TOKENS)) assert.equal(map.visible(q, k), FIRST[q] <= k && k <= q);
  for (const [at, query, keys] of [[0, 5, [3, 5]], [1, 5, [3, 5]], [0, 4, [0, 3]], [0, 2, [4, 5]]]) {
    const seen = range(TOKENS).filter((k) => k <= query && k >= (at === 0 ? FIRST[query] : 0));
    const share = seen.filter((k) => k >= keys[0] && k < keys[1]).length / seen.length;
    near([await page.uniform(0, at, query, [keys], DEFAULTS)], [share]);
  }
});

test("ends: a query that sees ahead, and one that sees nothing", async () => {
  const END = [6, 6, 6, 6, 0, 0];
  const end = Buffer.from(Int32Array.from(END).buffer);
  const maps = await pageOf().blobs.get(0);
  const page = pageOf({ blobs: [Buffer.from(maps), end], end: [{ blob: 1, offset: 0 }, null] });
  const [map, causal] = [await page.sides[0].map(0, 0), await page.sides[0].map(1, 0)];
  for (const q of range(TOKENS))
    for (const k of range(TOKENS)) {
      assert.equal(map.visible(q, k), k < END[q]);
      assert.equal(causal.visible(q, k), k <= q);
    }
  near([await page.uniform(0, 0, 1, [[3, 5]], DEFAULTS)], [2 / 6]);
  near([await page.uniform(0, 0, 5, [[3, 5]], DEFAULTS)], [0]);
  const look = await page.filtered(0, 0, 0, 1, DEFAULTS);
  assert.deepEqual(range(TOKENS).map(look.visible), range(TOKENS).map(() => true));
  const column = await page.filteredColumn(0, 0, 0, [5, 6], DEFAULTS);
  assert.deepEqual(range(TOKENS).map(column.visible), END.map((stop) => stop > 5));
});

test("the strongest keys stand in for a binned map", async () => {
  const k = 2;
  const heads = [{ at: 0, head: 0 }, { at: 1, head: 0 }];
  const keys = heads.flatMap((_, n) => range(TOKENS).flatMap((q) => [q, q > 0 ? n * (q - 1) : 0xffffffff]));
  const stored_ = keys.map((key, i) => (key === 0xffffffff ? 0 : 60000 - 100 * i));
  const relations = Buffer.concat([Buffer.from(Uint32Array.from(keys).buffer), Buffer.from(Uint16Array.from(stored_).buffer)]);
  const bins = Uint8Array.from([10, 20, 30, 40, 50, 60]); // 3 bins of 2 tokens
  const maps = heads.map((head) => ({ ...head, rows: 3, columns: 3, bin: 2, scale: 0.01, bits: 8, triangle: true, blob: 1, offset: 0 }));
  const page = pageOf({ blobs: [relations, bins], maps, relations: { k, heads, blob: 0, offset: 0, scale: 1e-5, bits: 16 } });
  const expected = (n, q) => {
    const row = Array(TOKENS).fill(0);
    for (const i of range(k)) {
      const place = (n * TOKENS + q) * k + i;
      if (keys[place] !== 0xffffffff) row[keys[place]] = stored_[place] * 1e-5;
    }
    return row;
  };
  for (const [n, { at, head }] of heads.entries())
    for (const q of range(TOKENS)) near((await page.filtered(0, at, head, q, DEFAULTS)).weights, expected(n, q));
  const column = await page.filteredColumn(0, 1, 0, [2, 3], DEFAULTS);
  near(column.weights, range(TOKENS).map((q) => expected(1, q)[2]));
  assert.equal(column.whole, false);
  const grid = await page.filteredMap(0, 0, 0, { ...DEFAULTS, special: false });
  near(grid.row(2), [0, 0.5, 0.6]); // the bin that holds the special token is out
  near(grid.removed, [0.1, 0.2, 0.4]);
  assert.deepEqual(grid.rowUnits.label, ["0–1", "2–3", "4–5"]);
  assert.equal(page.sides[0].holds(0, 0), "strongest");
  assert.equal(await page.filtered(0, 0, 1, 0, DEFAULTS), null);
});

test("a small picture keeps the largest weight of its cells", () => {
  const rows = [[5, 0, 0, 0], [1, 2, 0, 0], [0, 7, 1, 0], [3, 0, 0, 9]].map((row) => Float32Array.from(row));
  const small = pool({ row: (q) => rows[q] }, 4, (q) => [0, q + 1], { size: 2, least: 0, keep: null });
  near(small.values.filter((one) => !Number.isNaN(one)), [5, 7, 9]);
  assert.ok(Number.isNaN(small.values[1]));
  assert.equal(small.max, 9);
});

test("a weight below half a step is said to be that, not 0", () => {
  assert.equal(said(0.25, 1 / 255), "0.250");
  assert.equal(said(0, 0.004), "<0.002");
  assert.equal(said(0, 0.0005), "<0.001");
  assert.equal(said(0.0004, 1e-5), "<0.001");
  assert.equal(said(0.0006, 1e-5), "0.001");
  assert.equal(exactly(0.529412, 1 / 255), "0.529412 ± 0.002, stored in steps of 0.0039");
});

test("a state survives its address", () => {
  const state = {
    ...DEFAULTS, view: "token", at: 3, head: 1, query: 0, key: 7, keyEnd: 9, group: "a & b=c", heads: [{ at: 1, head: 4 }, { at: 2, head: 0 }],
    sink: false, least: 0.015, log: true, words: true, part: "answer", metric: "entropy", theme: "dark", from: "key", over: "all",
  };
  assert.deepEqual({ ...DEFAULTS, ...parse(`#${write(state)}`) }, state);
  assert.equal(write(DEFAULTS), "view=model&at=0&head=0");
});

test("an address that means nothing changes nothing", () => {
  const hash = "view=evil&at=-1&head=1.5&query=x&least=7&sink=maybe&heads=1,a.b,2.3&part=<script>&theme=&key=&__proto__=1";
  assert.deepEqual(parse(hash), { heads: [{ at: 2, head: 3 }] });
});

test("what the page does not hold is replaced by what it does", () => {
  const page = pageOf();
  const state = page.clean({ ...DEFAULTS, at: 9, head: 9, query: 6, key: 5, keyEnd: 99, side: "diff", metric: "x", heads: [{ at: 7, head: 0 }] });
  assert.deepEqual(
    [state.at, state.head, state.query, state.key, state.keyEnd, state.side, state.metric, state.heads],
    [1, 0, null, 5, 6, "0", "focus", []],
  );
});

test("the store writes the address, tells its listeners, and follows the way back", () => {
  const listeners = {};
  const written = [];
  Object.assign(globalThis, {
    location: { hash: "" },
    addEventListener: (name, listener) => (listeners[name] = listener),
    history: { pushState: (_, __, to) => written.push(["push", to]), replaceState: (_, __, to) => written.push(["replace", to]) },
  });
  const store = new Store("view=head&at=1&head=0", (state) => state);
  const seen = [];
  store.subscribe((state) => seen.push(state.head));
  store.set({ head: 1 });
  store.set({ head: 1 });
  store.flush();
  store.set({ log: true });
  store.flush();
  globalThis.location.hash = "#view=head&at=1&head=0";
  listeners.popstate();
  assert.deepEqual(seen, [1, 1, 0]);
  assert.deepEqual(written.map(([how]) => how), ["replace", "push", "replace"]);
  assert.equal(written[1][1], "#view=head&at=1&head=1");
});

test("a text is found where it stands, over tokens too, and a number is a position", () => {
  const tokens = { plain: PLAIN, label: LABELS };
  assert.deepEqual(find(tokens, "financial"), [[2, 4]]);
  assert.deepEqual(find(tokens, "BANK"), [[4, 5]]);
  assert.deepEqual(find(tokens, "an"), [[3, 4], [4, 5]]);
  assert.deepEqual(find(tokens, "-1"), [[5, 6]]);
  assert.deepEqual(find(tokens, "·on"), [[5, 6]]);
  assert.deepEqual(find(tokens, "nowhere"), []);
  assert.equal(find(tokens, "").length, TOKENS);
});

test("the slider goes there and back", () => {
  for (const place of range(101)) assert.ok(Math.abs(sliderOf(leastOf(place)) - place) <= 1);
  assert.deepEqual([leastOf(0), leastOf(100)], [0, 1]);
});

/** OKLab's lightness of a colour in bytes, by its published matrices. */
function lightness(rgb) {
  const [r, g, b] = [...rgb].map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return 0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s;
}

test("colours: equal steps of a value are equal steps of lightness, in light and dark", () => {
  for (const theme of ["light", "dark"]) {
    globalThis.document = { documentElement: { dataset: { theme } } };
    const at = (ramp, i) => lightness(ramp.rgb.subarray(3 * i, 3 * i + 3));
    const whole = at(sequential(), 255) - at(sequential(), 0);
    assert.equal(Math.sign(whole), theme === "dark" ? 1 : -1);
    for (let i = 0; i <= 240; i += 15) {
      const step = at(sequential(), i + 15) - at(sequential(), i);
      assert.ok(Math.abs(step / whole - 15 / 255) < 0.01, `${theme} ${i}: ${step / whole}`);
      assert.ok(Math.abs(at(diverging(), i) - at(diverging(), 255 - i)) < 0.01, `${theme} ${i} and its opposite`);
    }
  }
});

test("colours: black and white are that, a log scale is one, the ink stands out", () => {
  assert.deepEqual([srgb(1, 0, 0), srgb(0, 0, 0)], [[255, 255, 255], [0, 0, 0]]);
  assert.equal(intensity(0.5, false)(0.25), 0.5);
  assert.ok(Math.abs(intensity(1, true, 1e-4)(1e-2) - 0.5) < 1e-9);
  const greys = { rgb: Uint8ClampedArray.from(range(768), (i) => Math.floor(i / 3)), packed: new Uint32Array(256) };
  assert.deepEqual([inkOn(greys, 0), inkOn(greys, 1), css(greys, 2)], ["#ffffff", "#000000", "rgb(255 255 255)"]);
});

test("the ink on any colour is read: a contrast of at least 4.5", () => {
  for (const theme of ["light", "dark"]) {
    globalThis.document = { documentElement: { dataset: { theme } } };
    for (const [ramp, step] of [sequential(), diverging()].flatMap((ramp) => range(256).map((step) => [ramp, step]))) {
      const colours = [inkOn(ramp, step / 255), css(ramp, step / 255)];
      const [dark, light] = colours.map((colour) => luminance(bytesOf(colour))).sort((a, b) => a - b);
      assert.ok((light + 0.05) / (dark + 0.05) >= 4.5, colours.join(" on "));
    }
  }
});

/** The bytes of `#rrggbb` or `rgb(r g b)`. */
const bytesOf = (colour) =>
  colour.startsWith("#") ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) : colour.match(/\d+/g).map(Number);

const CUT = { set: "L0H0", at: 0, layer: 0, head: 0, heads: [[0, 0]], key: null };
const cutsOf = (over, effects) => ({ over, rows: effects.map((effect) => ({ ...CUT, effect })) });

test("cuts are sorted by effect, those that no query sees last; layers keep the model's order", () => {
  assert.deepEqual(inOrder(cutsOf("heads", [0.1, null, 2, -1])), [2, 0, 3, 1]);
  assert.deepEqual(inOrder(cutsOf("keys", [0.1, 0.1, 0.2])), [2, 0, 1]);
  assert.deepEqual(inOrder(cutsOf("window:3", [0.1, null, 2, -1])), [0, 1, 2, 3]);
  assert.deepEqual(["none", "heads", "kv", "layers", "window:12", "keys"].map((over) => kindOf({ over })), [
    "none", "heads", "heads", "layers", "layers", "keys",
  ]);
});

test("an effect has its sign, and what is too small for three decimals none that is wrong", () => {
  const said = [1.734, -0.0214, 0, 0.0004, -0.0004, 0.0005, 23.1, null].map(plus);
  assert.deepEqual(said, ["+1.73", "−0.021", "0", "<0.001", ">−0.001", "+0.001", "+23.1", "–"]);
});

test("what runs from right to left keeps its place in a line, as in a picture", () => {
  const [FSI, PDI] = ["\u2068", "\u2069"];
  for (const [line, expected] of [
    ["4 ·bank", "4 ·bank"],
    ["4 ·ل·2/2", `4 ·${FSI}ل${PDI}·2/2`],
    ["ל/bank, שלום (2)", `${FSI}ל${PDI}/bank, ${FSI}שלום${PDI} (2)`],
    ["שלום, בנק 85", `${FSI}שלום, בנק${PDI} 85`],
    ["ב\u05b0·1/2", `${FSI}ב\u05b0${PDI}·1/2`],
    ["demo: “the בנק on 5” | “the bank”", `demo: “${FSI}the בנק on 5${PDI}” | “the bank”`],
  ])
    assert.equal(isolated(line), expected);
});

test("the numbers of a vector are as wide as one another, with a blank between", () => {
  const rows = [[-2.289, 1.3007, -12.5], [0.3945, -1.2475, 3]].map((row) => numbers(Float64Array.from(row), 3));
  assert.deepEqual(rows, ["\u2007−2.289\u2007\u2007\u20071.301\u2007−12.500", "\u2007\u20070.395\u2007\u2007−1.248\u2007\u2007\u20073.000"]);
});

test("tokens are named with their positions, many by their number", () => {
  assert.equal(namedTokens(LABELS, [2, 4]), "2 ·fin, 4 ·bank");
  const many = namedTokens(range(20).map(String), range(20));
  assert.equal(many, "0 0, 1 1, 2 2, 3 3, 4 4, 5 5, … 20 tokens");
});

test("the scale of a curve holds its values and 0, in steps of 1, 2 or 5", () => {
  assert.deepEqual(scaleOf([2.6, 0.1, null]), [0, 3, 1]);
  assert.deepEqual(scaleOf([null]), [0, 1, 1]);
  for (const values of [[-3, 7], [1e-5, 2e-5], [-1e4], [0.3, -0.01], [5]]) {
    const [low, high, every] = scaleOf(values);
    const near = 1e-9 * every;
    assert.ok(low <= Math.min(0, ...values) + near && high >= Math.max(0, ...values) - near, `${values}: ${low} to ${high}`);
    assert.ok((high - low) / every <= 8 && /^[125](e|$)/.test(String(Number(every.toPrecision(3)).toExponential())), `${every}`);
  }
});
