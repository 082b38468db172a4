/**
 * Colours that read in light and dark. The scales run through OKLCH with lightness linear in the value, so equal steps
 * look equal; they begin at the page's own paper. Sets of colours keep apart for colour-blind readers by lightness too.
 */

/** @typedef {{rgb: Uint8ClampedArray, packed: Uint32Array}} Ramp 256 colours, as bytes and as 0xAABBGGRR */

const SIZE = 256;
const system = () => matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now: what was chosen, else what the system prefers. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === "dark" || (chosen !== "light" && system().matches);
}

/** @param {() => void} change called when the system's preference changes */
export function onScheme(change) {
  system().addEventListener("change", change);
}

/**
 * OKLCH to sRGB bytes (Ottosson 2020), with as much of the chroma as a screen shows.
 *
 * @param {number} lightness @param {number} chroma @param {number} hue in degrees
 * @returns {[number, number, number]}
 */
export function srgb(lightness, chroma, hue) {
  let linear = linearSrgb(lightness, chroma, hue);
  for (let part = 0.97; part > 0 && linear.some((one) => one < 0 || one > 1); part -= 0.03)
    linear = linearSrgb(lightness, chroma * part, hue);
  return /** @type {[number, number, number]} */ (linear.map(byte));
}

/** @param {number} lightness @param {number} chroma @param {number} hue in degrees */
function linearSrgb(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

/** @param {number} linear */
function byte(linear) {
  const value = linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055;
  return Math.round(255 * Math.min(1, Math.max(0, value)));
}

/** @param {(t: number) => [lightness: number, chroma: number, hue: number]} path @returns {Ramp} */
function ramp(path) {
  const rgb = new Uint8ClampedArray(3 * SIZE);
  const packed = new Uint32Array(SIZE);
  for (let i = 0; i < SIZE; i++) {
    const [r, g, b] = srgb(...path(i / (SIZE - 1)));
    rgb.set([r, g, b], 3 * i);
    packed[i] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }
  return { rgb, packed };
}

/** @param {number} from @param {number} to @param {number} t */
const mix = (from, to, t) => from + (to - from) * t;

/** From paper to ink: 0 is close to the paper of the page, 1 stands out most. */
const SEQUENTIAL = {
  light: ramp((t) => [mix(0.966, 0.27, t), mix(0.006, 0.1, t) + 0.09 * Math.sin(Math.PI * t), mix(238, 278, t)]),
  dark: ramp((t) => [
    mix(0.25, 0.96, t),
    0.025 + 0.125 * Math.sin(Math.PI * mix(0.03, 0.88, t)),
    mix(282, 90, t ** 0.8),
  ]),
};

/** -1 to 1 about the paper: blue for less, orange for more. */
const DIVERGING = {
  light: ramp((t) => [mix(0.975, 0.42, Math.abs(2 * t - 1)), 0.16 * Math.abs(2 * t - 1) ** 0.8, t < 0.5 ? 258 : 48]),
  dark: ramp((t) => [mix(0.24, 0.82, Math.abs(2 * t - 1)), 0.14 * Math.abs(2 * t - 1) ** 0.8, t < 0.5 ? 240 : 62]),
};

/** Several heads side by side, after Okabe and Ito. */
const SEVERAL = {
  light: ["#0064a8", "#c04e00", "#00805a", "#a83c86", "#7a6a00", "#3f4bb8", "#8c2f2f", "#4d4d4d"],
  dark: ["#62b6f2", "#ff9d4d", "#3fd0a0", "#f08ecb", "#e8d447", "#a5a8ff", "#ff8a80", "#c9c9c9"],
};

const GOLDEN = 137.508; // degrees between hues that follow one another: no two come near

/** Of what a text shows and a scan names; light as in figures, which a test holds them to. @type {Record<string, {light: string, dark: string}>} */
const ROLE_COLOURS = {
  induction: { light: "#0072b2", dark: "#4ba3e3" },
  "prefix-matching": { light: "#1b24a9", dark: "#464fe5" },
  "previous-token": { light: "#e69f00", dark: "#ffb733" },
  self: { light: "#56b4e9", dark: "#a9dcfa" },
  "offset-2": { light: "#382e04", dark: "#95570f" },
  "offset-3": { light: "#7a5e2c", dark: "#9b7f55" },
  "offset-4": { light: "#b6c16a", dark: "#faf894" },
  "duplicate-token": { light: "#009e73", dark: "#2fcf9a" },
  sink: { light: "#cc79a7", dark: "#ee9cc8" },
  "long-range-copying": { light: "#671c5e", dark: "#751f9b" },
  local: { light: "#d55e00", dark: "#ff8a4c" },
};

/** @returns {Ramp} */
export const sequential = () => (isDark() ? SEQUENTIAL.dark : SEQUENTIAL.light);

/** @returns {Ramp} */
export const diverging = () => (isDark() ? DIVERGING.dark : DIVERGING.light);

/** @param {number} place @returns {string} the colour of the n-th head; beyond the eight told apart best, hues between */
export function several(place) {
  const colours = isDark() ? SEVERAL.dark : SEVERAL.light;
  if (place < colours.length) return colours[place];
  const lightness = (isDark() ? 0.7 : 0.44) + 0.05 * (place % 3);
  const bytes = srgb(lightness, 0.12, (place * GOLDEN) % 360);
  return `#${bytes.map((one) => one.toString(16).padStart(2, "0")).join("")}`;
}

/** @param {string} colour as `#rrggbb` @returns {string} the ink that is read best on it */
export function inkOnHex(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return readable([r, g, b]);
}

/** @param {string} role @returns {string|null} its colour; null for no role */
export function roleColour(role) {
  return ROLE_COLOURS[role]?.[isDark() ? "dark" : "light"] ?? null;
}

/** @param {number} t 0 to 1, clipped */
const index = (t) => Math.round(Math.min(1, Math.max(0, t)) * (SIZE - 1)) || 0;

/** @param {Ramp} ramp @param {number} t 0 to 1 @returns {number} 0xAABBGGRR, for `raster` */
export const pixel = (ramp, t) => ramp.packed[index(t)];

/** @param {Ramp} ramp @param {number} t 0 to 1 @returns {string} */
export function css({ rgb }, t) {
  const at = 3 * index(t);
  return `rgb(${rgb[at]} ${rgb[at + 1]} ${rgb[at + 2]})`;
}

/** @param {Ramp} ramp @param {number} t @returns {string} the ink that is read best on that colour */
export function inkOn({ rgb }, t) {
  const at = 3 * index(t);
  return readable([rgb[at], rgb[at + 1], rgb[at + 2]]);
}

/** @param {number} colour 0xAABBGGRR @returns {string} the ink that is read best on it */
export const inkOnPixel = (colour) => readable([colour & 255, (colour >> 8) & 255, (colour >> 16) & 255]);

const EQUAL = Math.sqrt(1.05 * 0.05) - 0.05; // the luminance that black and white contrast with equally, 4.58 : 1

/** @param {[number, number, number]} bytes of a colour; WCAG asks for a contrast of 4.5, which a softer black misses */
const readable = (bytes) => (luminance(bytes) > EQUAL ? "#000000" : "#ffffff");

/** @param {[number, number, number]} bytes of a colour @returns {number} its relative luminance (WCAG 2.2), 0 to 1 */
export function luminance(bytes) {
  const [r, g, b] = bytes.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/**
 * How strongly a weight is drawn, 0 to 1, whatever its sign: linear to `max`, or logarithmic over `floor` to `max`.
 *
 * @param {number} max @param {boolean} log @param {number} [floor]
 * @returns {(weight: number) => number}
 */
export function intensity(max, log, floor = 1e-3) {
  if (!log) return (weight) => Math.abs(weight) / max;
  const low = Math.min(floor, max / 10);
  const range = Math.log(max / low);
  return (weight) => (Math.abs(weight) > low ? Math.log(Math.abs(weight) / low) / range : 0);
}

/**
 * The colours of weights of one sign, from paper to ink, or of both, about the paper.
 *
 * @param {number} max @param {(weight: number) => number} strength @param {boolean} signed
 * @returns {{ramp: Ramp, low: number, place: (weight: number) => number}} place: on the ramp, 0 to 1
 */
export function shading(max, strength, signed) {
  if (!signed) return { ramp: sequential(), low: 0, place: strength };
  const place = (/** @type {number} */ weight) => 0.5 + (Math.sign(weight) * Math.min(1, strength(weight))) / 2;
  return { ramp: diverging(), low: -max, place };
}

/** @param {string} name of a custom property @returns {string} what the style sheet says of it now */
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
