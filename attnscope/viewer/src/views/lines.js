/**
 * Lines between tokens, and the bands beside them.
 *
 * @typedef {import("../data.js").Look} Look
 */
const LABELS = 0.38; // of the width, on either side: as in views.css
const [WIDEST, APART] = [18, 1]; // CSS pixels of a head's box, and between two
const DASHES = [6, 4];
const [BAR, EMPTY] = [0.6, 0.05]; // opacity of a bar, and of the box of a head that gives nothing

/**
 * @param {CanvasRenderingContext2D} context @param {number} width of the view
 * @param {number} from @param {number} to heights @param {number} strong 0 to 1 @param {boolean} below of a weight below 0
 */
export function line(context, width, from, to, strong, below) {
  const [left, right] = [LABELS * width, (1 - LABELS) * width];
  context.globalAlpha = strong;
  context.lineWidth = 0.75 + 2.25 * strong;
  context.beginPath();
  context.moveTo(left, from);
  context.bezierCurveTo(width / 2, from, width / 2, to, right, to);
  context.setLineDash(below ? DASHES : []);
  context.stroke();
}

/** The strongest line of one row is drawn in full. @param {(Look|null)[][]} found */
export function largest(found) {
  let most = 0;
  for (const look of found.flat()) look?.weights.forEach((weight) => (most = Math.max(most, Math.abs(weight))));
  return most || 1;
}

/**
 * How much each head gives to a token: of one head a bar as long as its weight, of several a box for each, below the
 * boxes of the same head beside other tokens. `data-bands` says what is drawn: colour, weight, strength.
 *
 * @param {HTMLElement} band @param {number[]} weights @param {"query"|"key"} axis @param {string[]} colours of the heads
 * @param {{box: number, whole: number, strength: (weight: number) => number}} look box: CSS pixels of a box;
 *   whole: what fills a bar
 */
export function bands(band, weights, axis, colours, { box, whole, strength }) {
  const side = axis === "key" ? "left" : "right";
  const boxes = weights.length > 1;
  const drawn = weights.map((one, place) => {
    const size = Math.abs(one) || 0;
    const weight = Math.min(1, size / whole);
    const share = boxes ? EMPTY + (1 - EMPTY) * Math.min(1, strength(size)) : BAR;
    return /** @type {[string, number, number]} */ ([colours[place], weight, Number.isNaN(one) ? 0 : Number(share.toFixed(3))]);
  });
  const filled = drawn.map(([colour, , share]) => `color-mix(in srgb, ${colour} ${(100 * share).toFixed(1)}%, transparent)`);
  const sizes = drawn.map(([, weight]) => (boxes ? `${box}px` : `${(100 * weight).toFixed(2)}%`));
  band.dataset.from = side;
  band.dataset.box = boxes ? String(box) : "";
  band.dataset.bands = JSON.stringify(drawn);
  band.style.backgroundImage = filled.map((colour) => `linear-gradient(${colour} 0 0)`).join(", ");
  band.style.backgroundSize = sizes.map((size) => `${size} 100%`).join(", ");
  band.style.backgroundPosition = drawn.map((_, place) => `${side} ${boxes ? place * (box + APART) : 0}px top`).join(", ");
}

/** @param {number} room CSS pixels of a band @param {number} heads @returns {number} CSS pixels of a box, so that all have room */
export const boxOf = (room, heads) => Math.max(1, Math.min(WIDEST, Math.floor(room / heads) - APART));
