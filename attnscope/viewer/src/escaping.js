/** Text that somebody else wrote, as the page may show it: nothing that turns a line around or has no shape. */

// As in attnscope/errors.py, but blanks stay, and the joiners and tags of emoji.
const HIDDEN =
  /(?![\n\t\u200d\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u{110bd}\u{110cd}\u{e0020}-\u{e007f}])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]|[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffe\uffff]/gu;
const EXACT = new Set(["plain", "src", "open"]); // a token as it is searched for, a picture, a state

/** @param {string} text @returns {string} where what has no shape is written as `⟨202E⟩` */
export function visible(text) {
  return text.replace(HIDDEN, (one) => `⟨${(one.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

const RIGHT_TO_LEFT = "[\\u0590-\\u08ff\\ufb1d-\\ufdff\\ufe70-\\ufefc\\u{10800}-\\u{10fff}\\u{1e800}-\\u{1efff}]"; // blocks of such scripts
const TURNED = new RegExp(`“([^“”]*)”|${RIGHT_TO_LEFT}(?:[^\\p{L}\\p{Nd}]*${RIGHT_TO_LEFT})*`, "gu");
const SOME = new RegExp(RIGHT_TO_LEFT, "u");

/**
 * A line that runs from left to right, as a token with its position, in which what runs from right to left keeps its
 * place: each stretch of it, and each quoted text with some, is isolated, as in attnscope/figures/fonts.py.
 *
 * @param {string} line
 */
export function isolated(line) {
  return line.replace(TURNED, (stretch, /** @type {string|undefined} */ quoted) => {
    if (!SOME.test(stretch)) return stretch;
    return quoted === undefined ? `\u2068${stretch}\u2069` : `“\u2068${quoted}\u2069”`;
  });
}

/**
 * The page's data with all its words visible. What each token is, `plain`, stays: whoever shows that takes `visible`.
 *
 * @param {any} value @returns {any}
 */
export function escaped(value) {
  if (typeof value === "string") return visible(value);
  if (Array.isArray(value)) return value.map(escaped);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(([name, one]) => [visible(name), EXACT.has(name) ? one : escaped(one)]);
  return Object.fromEntries(entries);
}
