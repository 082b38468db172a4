/** The views of the page, in the order of their tabs and keys. */
import { mount as compare } from "./views/compare.js";
import { mount as cuts } from "./views/cuts.js";
import { mount as depth } from "./views/depth.js";
import { mount as head } from "./views/head.js";
import { mount as matrix } from "./views/matrix.js";
import { mount as metrics } from "./views/metrics.js";
import { mount as model } from "./views/model.js";
import { mount as picture } from "./views/picture.js";
import { mount as steps } from "./views/steps.js";
import { mount as text } from "./views/text.js";
import { mount as token } from "./views/token.js";
import { mount as why } from "./views/why.js";

/**
 * @typedef {import("./types.js").SideData} SideData
 * @typedef {import("./types.js").Mount} Mount
 * @typedef {{id: string, title: string, mount: Mount, shows: (side: SideData, sides: number) => boolean}} Tab
 */

const weights = (/** @type {SideData} */ side) => side.relations !== null || side.maps.some(({ bin }) => bin === 1);
const maps = (/** @type {SideData} */ side) => side.maps.length > 0;

/** @type {Tab[]} */
const TABS = [
  { id: "model", title: "Model", mount: model, shows: (side) => maps(side) || weights(side) },
  { id: "metrics", title: "Metrics", mount: metrics, shows: (side) => side.metrics.length > 0 },
  { id: "head", title: "Head", mount: head, shows: weights },
  { id: "matrix", title: "Matrix", mount: matrix, shows: maps },
  { id: "text", title: "Text", mount: text, shows: weights },
  { id: "picture", title: "Picture", mount: picture, shows: (side) => weights(side) && !!side.pictures?.length },
  { id: "token", title: "Token", mount: token, shows: weights },
  { id: "steps", title: "Steps", mount: steps, shows: (side) => side.steps !== null },
  { id: "why", title: "Why", mount: why, shows: (side) => !!side.why },
  { id: "cuts", title: "Cuts", mount: cuts, shows: (side) => !!side.cuts },
  { id: "depth", title: "Depth", mount: depth, shows: (side) => !!side.depth },
  { id: "compare", title: "Compare", mount: compare, shows: (_, sides) => sides > 1 },
];

const NO_STEPS = "not in this page: they need q, k and v, kept for decoders and texts of up to 256 tokens";

/** @param {SideData[]} sides @returns {{id: string, title: string, reason: string}[]} greyed, with why */
export const greyed = (sides) =>
  alone(sides) || sides.some((side) => side.steps !== null) ? [] : [{ id: "steps", title: "Steps", reason: `Steps: ${NO_STEPS}` }];

/** @param {SideData[]} sides @returns {Tab[]} those that the page has something for */
export const tabsOf = (sides) => TABS.filter((tab) => sides.some((side) => tab.shows(side, sides.length)));

/** @param {SideData[]} sides @returns {boolean} whether the page holds a study and nothing else: no weights, so no selection of them */
export const alone = (sides) => tabsOf(sides).every(({ id }) => id === "cuts" || id === "depth");
