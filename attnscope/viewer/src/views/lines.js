/**
 * Lines between tokens, and the bands beside them.
 *
 * @typedef {import("../data.js").Look} Look
 */
const LABELS = 0.38; // of the width, on either side: as in views.css

/**
 * @param {CanvasRenderingContext2D} context @param {number} width of the view
 * @param {number} from @param {number} to heights @param {number} strong 0 to 1
 */
export function line(context, width, from, to, strong) {
  const [left, right] = [LABELS * width, (1 - LABELS) * width];
  context.globalAlpha = strong;
  context.lineWidth = 0.75 + 2.25 * strong;
  context.beginPath();
  context.moveTo(left, from);
  context.bezierCurveTo(width / 2, from, width / 2, to, right, to);
  context.stroke();
}

/** The strongest line of one row is drawn in full. @param {(Look|null)[][]} found */
export function largest(found) {
  let most = 0;
  for (const look of found.flat()) look?.weights.forEach((weight) => (most = Math.max(most, weight)));
  return most || 1;
}

/** A band for each head, one below the other, as long as its weight.
 *
 * @param {HTMLElement} band @param {number[]} weights @param {"query"|"key"} axis @param {string[]} colours of the heads
 */
export function bands(band, weights, axis, colours) {
  const direction = axis === "key" ? "to right" : "to left";
  const images = weights.map((weight, place) => {
    const colour = `color-mix(in srgb, ${colours[place]} 60%, transparent)`;
    const percent = `${Math.min(100, 100 * (weight || 0)).toFixed(2)}%`;
    return `linear-gradient(${direction}, ${colour} ${percent}, transparent ${percent})`;
  });
  band.dataset.from = axis === "key" ? "left" : "right";
  band.dataset.bands = JSON.stringify(weights.map((weight, place) => [colours[place], Math.min(1, weight || 0)]));
  band.style.backgroundImage = images.join(", ");
  band.style.backgroundSize = `100% ${100 / Math.max(1, images.length)}%`;
  band.style.backgroundPosition = images
    .map((_, place) => `0 ${(100 * place) / Math.max(1, images.length - 1)}%`)
    .join(", ");
}
