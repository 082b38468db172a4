/**
 * One text read by one model: its tokens, heads and what the page holds of their weights.
 *
 * @typedef {import("./types.js").SideData} SideData
 * @typedef {import("./types.js").State} State
 * @typedef {import("./weights.js").Blobs} Blobs
 */
import { Units, kept, originOf } from "./units.js";
import { Reach, Strongest, WeightMap } from "./weights.js";

const RESTS = 0.3; // mean mass above which a head rests on a key, as in attnscope/metrics/roles.py
const FAN = 20; // tokens from which the lines to such a key cover all others

/** One text read by one model. */
export class Side {
  /** @param {SideData} data @param {Blobs} blobs */
  constructor(data, blobs) {
    this.data = data;
    this.blobs = blobs;
    this.tokens = data.tokens;
    this.count = data.tokens.label.length;
    this.layers = data.layers;
    this.heads = data.heads;
    this.metrics = data.metrics;
    this.maps = new Map(data.maps.map((entry) => [`${entry.at}.${entry.head}`, entry]));
    this.indices = new Map(data.heads.map(({ at, head }, index) => [`${at}.${head}`, index]));
    this.related = new Map(data.relations?.heads.map(({ at, head }, index) => [`${at}.${head}`, index]));
    this.tokenUnits = Units.tokens(data.tokens.label);
    this.wordUnits = data.words.length ? Units.spans(data.words, data.tokens.label) : this.tokenUnits;
    /** where the texts begin that stacks read, each with positions of its own */
    this.origins = [...new Set([0, ...data.layers.flatMap(({ queries, keys }) => [queries?.[0] ?? 0, keys?.[0] ?? 0])])].sort(
      (one, other) => one - other,
    );
    this.tokenUnits.origins = this.wordUnits.origins = this.origins;
    /** the stacks, in the model's order */
    this.stacks = [...new Set(data.layers.map(({ stack }) => stack ?? "decoder"))];
    /** @type {Map<string, Promise<WeightMap>>} */
    this.opened = new Map();
    /** @type {Map<string, Promise<Strongest>>} */
    this.strongest = new Map();
  }

  /** @param {number} at @returns {string} the stack of a layer */
  stackOf(at) {
    return this.layers[at]?.stack ?? "decoder";
  }

  /** @param {number} at @returns {number[]} the layers of its stack */
  layersWith(at) {
    return [...this.layers.keys()].filter((other) => this.stackOf(other) === this.stackOf(at));
  }

  /** @param {number} at @returns {import("./types.js").Head[]} the heads of its stack */
  headsWith(at) {
    return this.stacks.length > 1 ? this.heads.filter((head) => this.stackOf(head.at) === this.stackOf(at)) : this.heads;
  }

  /**
   * The tokens that are queries and keys of a layer, half-open: of one text, or of the two that cross-attention reads;
   * of a pair of texts, those of the state's choice of them.
   *
   * @param {number} at @param {{pair: string}} [state]
   * @returns {{queries: [number, number], keys: [number, number]}}
   */
  axes(at, { pair } = { pair: "all" }) {
    const { queries = [0, this.count], keys = [0, this.count] } = this.layers[at] ?? {};
    const second = this.data.pair ?? null;
    if (second === null || pair === "all") return { queries, keys };
    const texts = { a: /** @type {[number, number]} */ ([0, second]), b: /** @type {[number, number]} */ ([second, this.count]) };
    return { queries: texts[pair[0] === "a" ? "a" : "b"], keys: texts[pair[1] === "a" ? "a" : "b"] };
  }

  /** @param {number} token @returns {number} its position in its own text */
  number(token) {
    return token - originOf(this.origins, token);
  }

  /** @param {number} at @param {State} state @returns {number} the last query of a layer with a letter or a digit, else the last */
  lastQuery(at, state) {
    const [start, stop] = this.axes(at, state).queries;
    const { plain, special } = this.tokens;
    for (let token = stop - 1; token >= start; token--)
      if (!special[token] && /[\p{L}\p{N}]/u.test(plain[token])) return token;
    return Math.max(0, stop - 1);
  }

  /** @param {number} at @returns {number|null} its first query that is of the answer, which follows the prompt */
  answer(at) {
    const { answer } = this.data;
    const [start, stop] = this.axes(at).queries;
    return answer !== null && answer > start && answer < stop ? answer : null;
  }

  /** @param {number} at @returns {string} what stands before a layer of a stack beside the decoder's, as in `cross ` */
  stack(at) {
    const stack = this.layers[at]?.stack ?? "decoder";
    return stack === "decoder" || this.layers.every((layer) => layer.stack === stack) ? "" : `${stack} `;
  }

  /** @param {number} at @param {number} head @returns {string} as in `L27H3`, `cross L3H2` */
  name(at, head) {
    return `${this.stack(at)}L${this.layers[at]?.layer ?? at}H${head}`;
  }

  /** @param {number} at @returns {string} `window` or `chunk` of a layer whose queries see a part of the text, or "" */
  window(at) {
    return /^(window|chunk) \d/.exec(this.layers[at]?.visible ?? "")?.[1] ?? "";
  }

  /** @param {number} at @returns {boolean} whether the weights of a layer have a sign */
  signed(at) {
    return this.layers[at]?.signed ?? false;
  }

  /** @param {number} at @returns {boolean} whether the weights of a layer are shares of 1 */
  shares(at) {
    return this.layers[at]?.shares ?? true;
  }

  /** @param {number} at @param {number} head */
  headAt(at, head) {
    return this.heads[this.indices.get(`${at}.${head}`) ?? -1];
  }

  /** @param {number} at @param {number} head what the page holds of a head */
  holds(at, head) {
    const map = this.maps.get(`${at}.${head}`);
    if (map?.bin === 1) return "weights";
    if (this.related.has(`${at}.${head}`)) return "strongest";
    return map ? "bins" : "nothing";
  }

  /** @param {boolean} words */
  units(words) {
    return words ? this.wordUnits : this.tokenUnits;
  }

  /** @param {number} at @param {number} head @returns {number|null} its top key, where that has more than RESTS of its mass */
  rest(at, head) {
    const { top_key: key = null, top_key_mass: mass } = this.headAt(at, head) ?? {};
    return (mass ?? 0) > RESTS ? key : null;
  }

  /** @param {number} at @param {number} head @returns {number} the key that the head rests on, else key 0 */
  sink(at, head) {
    return this.rest(at, head) ?? 0;
  }

  /**
   * Whether the sink of a head is out: by choice, else where its lines would cover all others. A chosen key stays.
   *
   * @param {number} at @param {number} head @param {State} state
   */
  withoutSink(at, head, { sink, view, key }) {
    if (sink !== null) return !sink;
    const rest = this.rest(at, head);
    return view === "head" && this.count > FAN && rest !== null && rest !== key;
  }

  /** @param {number} at @returns {Promise<Reach>} which keys each query of a layer sees */
  async reach(at) {
    const [first, end] = [this.data.first?.[at], this.data.end?.[at]].map(async (where) =>
      where ? new Int32Array(await this.blobs.get(where.blob), where.offset, this.count) : null,
    );
    return new Reach(await first, await end);
  }

  /** @param {number} at @param {number} head @returns {Promise<WeightMap|null>} null where the page has none */
  map(at, head) {
    const name = `${at}.${head}`;
    const entry = this.maps.get(name);
    if (!entry) return Promise.resolve(null);
    return once(this.opened, name, async () => {
      const [buffer, reach] = await Promise.all([this.blobs.get(entry.blob), this.reach(at)]);
      return new WeightMap(entry, buffer, reach, this.count);
    });
  }

  /** @param {number} at @param {number} head @returns {Promise<Strongest|null>} */
  relations(at, head) {
    const name = `${at}.${head}`;
    const index = this.related.get(name);
    const kept = this.data.relations;
    if (!kept || index === undefined) return Promise.resolve(null);
    return once(this.strongest, name, async () => {
      const buffer = await this.blobs.get(kept.blob);
      const size = this.count * kept.k;
      const all = kept.heads.length;
      const keys = new Uint32Array(buffer, kept.offset + 4 * index * size, size);
      const kind = kept.signed ? Int16Array : Uint16Array;
      const stored = new kind(buffer, kept.offset + 4 * all * size + 2 * index * size, size);
      return new Strongest(keys, stored, kept.scale, this.count);
    });
  }

  /**
   * Weights in tokens: the whole map, else the strongest keys.
   *
   * @param {number} at @param {number} head @returns {Promise<WeightMap|Strongest|null>}
   */
  async weights(at, head) {
    return this.maps.get(`${at}.${head}`)?.bin === 1 ? this.map(at, head) : this.relations(at, head);
  }

  /** @param {number} at @param {number} head @param {number} query @returns {Promise<Float32Array|null>} (tokens,) */
  async row(at, head, query) {
    return (await this.weights(at, head))?.row(query) ?? null;
  }

  /** @param {number} at @param {number} head @param {State} state @returns {Uint8Array} (tokens,): 1 for kept keys */
  keep(at, head, state) {
    return kept(this.data, { ...state, sink: !this.withoutSink(at, head, state) }, this.sink(at, head));
  }
}

/**
 * @template K, V
 * @param {Map<K, V>} known @param {K} name @param {() => V} make
 */
export function once(known, name, make) {
  let value = known.get(name);
  if (value === undefined) known.set(name, (value = make()));
  return value;
}
