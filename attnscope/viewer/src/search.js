/** Places of a text among tokens. */

/**
 * Half-open token ranges: the position itself for a number, then every place where the text stands or a label shows it,
 * case ignored. Everything for an empty text.
 *
 * @param {{plain: string[], label: string[]}} tokens @param {string} wanted
 * @returns {[start: number, stop: number][]}
 */
export function find({ plain, label }, wanted) {
  const places = [...plain.keys()];
  if (!wanted) return places.map((token) => [token, token + 1]);
  const text = wanted.toLowerCase();
  const position = /^-?\d+$/.test(wanted) ? places.at(Number(wanted)) : undefined;
  const spans = standing(plain, text);
  const covered = new Set(spans.flatMap(([start, stop]) => places.slice(start, stop)));
  if (position !== undefined) covered.add(position);
  const shown = places.filter((token) => !covered.has(token) && label[token].toLowerCase().includes(text));
  /** @type {[number, number][]} */
  const alone = (position === undefined ? shown : [position, ...shown]).map((token) => [token, token + 1]);
  return position === undefined ? [...spans, ...alone] : [alone[0], ...spans, ...alone.slice(1)];
}

/** @param {string[]} plain @param {string} wanted in lower case @returns {[number, number][]} each once */
function standing(plain, wanted) {
  const lower = plain.map((one) => one.toLowerCase());
  const owner = lower.flatMap((one, token) => Array.from({ length: one.length }, () => token));
  const text = lower.join("");
  /** @type {[number, number][]} */
  const found = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    const [start, stop] = [owner[at], owner[at + wanted.length - 1] + 1];
    const last = found.at(-1);
    if (last?.[0] !== start || last[1] !== stop) found.push([start, stop]);
  }
  return found;
}
