/**
 * What the page is made of: the JSON that Python writes (format attnscope/page/2), the state, and a view. No code.
 * Indices count from 0; ranges are half-open; `at` is a place in `layers`, which are in the model's order.
 *
 * @typedef {{positions: number[]}} Group
 * @typedef {{text: string, positions: number[]}} Asked
 *
 * @typedef {object} Tokens
 * @property {string[]} text what each token is, exactly
 * @property {string[]} label with every character visible: draw these
 * @property {string[]} plain what each shows; joined, they are the text
 * @property {(number|null)[]} id
 * @property {number[]} special 1 where the token is a special one
 * @property {(number|null)[]} start first character
 * @property {(number|null)[]} stop
 *
 * @typedef {[start: number, stop: number, name: string]} Span
 *
 * @typedef {object} Layer
 * @property {number} layer
 * @property {string} stack
 * @property {number} heads
 * @property {number | null} kv_heads
 * @property {string} visible
 * @property {boolean} [signed] whether its weights have a sign
 * @property {boolean} [shares] false where the weights of a row have no fixed sum
 * @property {[number, number]} [queries] of several stacks: its tokens, where their texts are one behind the other
 * @property {[number, number]} [keys]
 *
 * @typedef {object} Metric
 * @property {string} id
 * @property {string} short
 * @property {string} title
 * @property {string} formula
 * @property {string} unit
 * @property {number|null} low
 * @property {number|null} high
 * @property {string} reading
 *
 * @typedef {object} Head
 * @property {number} at
 * @property {number} head
 * @property {number | null} kv_head
 * @property {string} role what it is called, "-" for nothing
 * @property {string} text_role on this text
 * @property {boolean|null} near_uniform
 * @property {number|null} top_key
 * @property {number|null} top_key_mass
 * @property {(number|null)[]} scores one for each metric
 * @property {(number|null)[]} uniform what uniform attention would score
 * @property {string[]} [atlas] all that an atlas names it; the first is its role
 *
 * @typedef {object} MapEntry
 * @property {number} at
 * @property {number} head
 * @property {number} rows cells, of `bin` tokens each
 * @property {number} columns
 * @property {number} bin
 * @property {number} scale weight = stored number * scale
 * @property {8|16} bits
 * @property {boolean} [signed] whether the stored numbers have a sign
 * @property {boolean} triangle row i holds min(i + 1, columns) entries
 * @property {number} blob
 * @property {number} offset
 * @property {boolean} [windowed]
 *
 * @typedef {{blob: number, offset: number}} Place
 * @typedef {{at: number, head: number}} Name
 * @typedef {{k: number, heads: Name[], blob: number, offset: number, scale: number, bits: number, signed?: boolean}} Relations
 *
 * @typedef {object} StepsHead
 * @property {number} at
 * @property {number} head
 * @property {number} dim
 * @property {number} value_dim
 * @property {number} scale
 * @property {number|null} cap
 * @property {number|null} sink
 * @property {number} blob
 * @property {number} offset
 * @property {boolean} bias
 * @property {number} words which of the lists of words is its
 *
 * @typedef {[id: string, name: string, axes: string]} StepArray
 * @typedef {{name: string, formula: string, why: string, arrays: StepArray[]}} StepWords a step of `attnscope explain`
 *
 * @typedef {object} StepsData
 * @property {StepsHead[]} heads
 * @property {number} tokens
 * @property {StepWords[][]} words
 * @property {[all: string, some: string]} sees how many keys a query sees
 * @property {string[]} summed names of arrays whose sum over the keys is shown
 *
 * @typedef {{name: string, at?: number, head?: number}} Writer what wrote to the residual; at, head: where it is a head
 *
 * @typedef {object} WhyHead logits taken apart: float32 parts, (writers, queries, tokens), then the logits, NaN where hidden
 * @property {number} at
 * @property {number} head
 * @property {number[]} queries
 * @property {Writer[]} components
 * @property {number|null} cap
 * @property {boolean} sinks
 * @property {number} blob
 * @property {number} offset
 *
 * @typedef {object} SideData
 * @property {string} name
 * @property {{name: string, type: string, revision: string|null, layers: number, dtype: string}} model
 * @property {string} engine
 * @property {string} text
 * @property {Tokens} tokens
 * @property {Span[]} words
 * @property {Span[]} sentences
 * @property {Span[]} turns
 * @property {number|null} answer first token of the last assistant turn
 * @property {number|null} [pair] first token of the second text of a pair
 * @property {Layer[]} layers
 * @property {Metric[]} metrics
 * @property {Head[]} heads
 * @property {MapEntry[]} maps
 * @property {Relations|null} relations
 * @property {StepsData|null} steps
 * @property {WhyHead[]} [why]
 * @property {(Place|null)[]} first for each layer, the first key that each query sees; null where that is 0
 * @property {{src: string}[]} [pictures] beside the text, as data URIs
 * @property {import("./views/picture.js").Patch[]} [patches] the tokens that stand for a part of a picture, 0 to 1
 * @property {Cuts} [cuts] what was cut beforehand, and what it cost
 * @property {Depth} [depth] what each layer reads of earlier blocks
 * @property {(Place|null)[]} [end] for each layer, what is behind the last; null where that is the query's own
 *
 * @typedef {object} CutText
 * @property {number[]} queries
 * @property {number[]} keys
 * @property {string} answer
 * @property {string|null} foil
 * @property {{label: string[], plain: string[], special: number[]}|null} tokens null where they are the side's
 *
 * @typedef {object} Cut numbers are null where there are none
 * @property {string} set
 * @property {number|null} at of a layer, or the one in the middle of a window
 * @property {number|null} layer its number
 * @property {number|null} head
 * @property {[at: number, head: number][]} heads of a head or a kv group
 * @property {number|null} key
 * @property {number|null} mass
 * @property {number|null} effect null where no query sees a key
 * @property {number|null} low_all of all cuts at once; null where there is none, or the end is open
 * @property {number|null} high_all
 * @property {number|null} p
 * @property {number|null} positive the share of texts with an effect above 0
 * @property {number|null} null_permuted of the same weights on other keys: the mean effect
 * @property {number|null} low_permuted
 * @property {number|null} high_permuted
 * @property {number|null} p_permuted
 * @property {number} n_permuted
 * @property {number} pool keys that exchange places
 * @property {number|null} null_heads of other heads' own looks
 * @property {number|null} low_heads
 * @property {number|null} high_heads
 * @property {number|null} p_heads
 * @property {number} n_heads
 * @property {number} n
 *
 * @typedef {object} Cuts
 * @property {string} over
 * @property {"mask"|"zero"} how
 * @property {string} select
 * @property {string} unit
 * @property {number} random
 * @property {number|null} intact
 * @property {number} count of texts
 * @property {CutText[]} texts the first of them
 * @property {Cut[]} rows
 * @property {string[]} notes
 * @property {string|null} command
 * @property {string[]} python
 *
 * @typedef {object} Depth float32 numbers, (panels, readers, blocks), then norms as many; NaN where a block comes later
 * @property {string} unit
 * @property {string[]} readers
 * @property {string[]} blocks
 * @property {string[]} panels the mean, or tokens and streams
 * @property {number} blob
 * @property {number} offset
 * @property {string[]} notes
 * @property {string|null} command
 * @property {string[]} python
 *
 * @typedef {[first: number[], second: number[]]} UnitsOfSides the unit of each token of both sides, -1 for none
 *
 * What `attnscope compare` says of a head of two sides: bits, null where no row has mass on shared tokens in both, and
 * the mean mass that each side gives to tokens that the other lacks.
 * @typedef {{at: number, head: number, js: number|null, lost: [number, number]}} Divergence
 *
 * @typedef {object} PageData
 * @property {string} format
 * @property {string} version
 * @property {string} title
 * @property {string|null} [aligned] how the tokens of two sides are paired, in words
 * @property {string|null} command
 * @property {{commands: Record<string, string>, python: string[]}|null} [copied] what a copied command begins with
 * @property {SideData[]} sides
 * @property {Divergence[]} divergences of the heads of two sides
 * @property {{tokens: UnitsOfSides, words: UnitsOfSides}|null} units what two sides share, in tokens and in whole words
 * @property {string} open
 * @property {string[]} left_out
 * @property {Record<string, Group>} defined
 * @property {{query: Asked|null, key: Asked|null}} asked
 *
 * @typedef {object} State one selection for all views; `store.js` has the defaults
 * @property {string} view
 * @property {number} at
 * @property {number} head
 * @property {number|null} query a token of the side that is shown
 * @property {number|null} key
 * @property {number|null} keyEnd end of a span that begins at `key`
 * @property {string} group keys that the command named, of which `key` is the first; "" for none
 * @property {{at: number, head: number}[]} heads further heads, each in a colour of its own
 * @property {boolean} pin
 * @property {boolean|null} sink whether the key that a head rests on is shown; null: everywhere but in the lines of a long text
 * @property {boolean} special
 * @property {number} least
 * @property {boolean} log
 * @property {boolean} words
 * @property {"all"|"prompt"|"answer"} part the keys that are shown
 * @property {"all"|"ab"|"ba"|"aa"|"bb"} pair of a pair of texts: which of them queries are of, and which keys
 * @property {"0"|"1"|"diff"} side
 * @property {string} metric
 * @property {"auto"|"light"|"dark"} theme
 * @property {"query"|"key"} from text view: where a token looks, or who looks at it
 * @property {"head"|"layer"|"all"} over
 *
 * @typedef {import("./store.js").Store} Store
 * @typedef {import("./data.js").Page} Page
 * @typedef {import("./data.js").Side} Side
 *
 * @typedef {{render: (state: State) => void, pictured?: () => {about: string, name: string}}} View
 * @typedef {(element: HTMLElement, page: Page, store: Store) => View} Mount
 */
export {};
