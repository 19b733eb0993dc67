/** Scores of classes: the slopes of the softmax loss, the class that is predicted, the labels that count. */

/** p - e_y; null where the sample cannot be used. @param {Float64Array | null} scores @param {number} y */
export function softmaxSlopes(scores, y) {
  if (scores === null || !isClass(y, scores.length)) return null;
  const top = Math.max(...scores);
  const odds = scores.map((score) => Math.exp(score - top));
  const sum = odds.reduce((total, each) => total + each, 0);
  return odds.map((each, at) => each / sum - Number(at === y));
}

/** @param {number} y @param {number} classes */
export function isClass(y, classes) {
  return Number.isInteger(y) && y >= 0 && y < classes;
}

/** The place of the largest, the first of equals. @param {Float64Array} values */
export function argmax(values) {
  return values.reduce((best, value, at) => (value > values[best] ? at : best), 0);
}
