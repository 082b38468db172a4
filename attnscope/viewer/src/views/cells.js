/**
 * What a plot is drawn with: the picture of its cells, the hatching below it, ink and steps of its labels.
 *
 * @typedef {import("./plot.js").Drawn} Drawn
 */
import { raster } from "../canvas.js";
import { ink } from "../colours.js";

/**
 * The cells of a part of a map, the largest of each `step` x `step`: a strong cell
 * does not fade where many share a pixel.
 *
 * @param {Drawn} drawn @param {[number, number]} rows @param {[number, number]} columns @param {number} step
 */
export function picture({ grid, paint }, rows, columns, step) {
  const { values } = grid;
  return raster(Math.ceil((rows[1] - rows[0]) / step), Math.ceil((columns[1] - columns[0]) / step), (row, column) => {
    let best = NaN;
    const [top, left] = [rows[0] + row * step, columns[0] + column * step];
    for (let q = top; q < Math.min(top + step, grid.rows); q++)
      for (let at = q * grid.columns + left; at < q * grid.columns + Math.min(left + step, grid.columns); at++)
        if (!(Math.abs(best) >= Math.abs(values[at]))) best = Number.isNaN(values[at]) ? best : values[at];
    return Number.isNaN(best) ? 0 : paint(best);
  });
}

/** @param {CanvasRenderingContext2D} context @returns {CanvasPattern|string} diagonal lines on a panel */
export function hatched(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  pen.fillStyle = ink("panel");
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = ink("line");
  for (const shift of [-6, 0, 6]) line(pen, [shift, 6], [shift + 6, 0]);
  return context.createPattern(tile, "repeat") ?? ink("panel");
}

/** @param {CanvasRenderingContext2D} context @param {[number, number]} from @param {[number, number]} to */
export function line(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

/** @param {number} least @returns {number} 1, 2, 5, 10, 20, ...: the first that is not smaller */
export function ticks(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * /** @type {number} */ ([1, 2, 5, 10].find((digit) => digit * power >= least));
}
