// Blocks as squares. A router knows how many there are of each kind, not where
// they lie: so squares are in order of kind, in use from the front, cached at the back.

const MAX_PITCH = 13;
const MIN_PITCH = 4;

/**
 * Draws counts as squares, one for each block or, where they do not fit, for several.
 *
 * @param {HTMLCanvasElement} canvas as wide as its place
 * @param {[string, number][]} kinds name of a colour (a CSS variable) and count, in order
 * @param {number} maxHeight in pixels
 */
export function drawBlocks(canvas, kinds, maxHeight) {
  const total = kinds.reduce((sum, [, count]) => sum + count, 0);
  const width = canvas.clientWidth;
  if (!total || !width) return;
  const { pitch, columns, share } = layout(total, width, maxHeight);
  const squares = Math.ceil(total / share);
  const height = Math.ceil(squares / columns) * pitch;
  const scale = window.devicePixelRatio;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.ariaLabel = kinds.map(([name, count]) => `${count} ${name}`).join(", ");
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const gap = pitch > 7 ? 2 : 1;
  let square = 0;
  let passed = 0;
  for (const [name, count] of kinds) {
    passed += count;
    context.fillStyle = style.getPropertyValue(`--${name}`);
    context.beginPath();
    for (const end = Math.round(passed / share); square < end; square += 1) {
      const x = (square % columns) * pitch;
      const y = Math.floor(square / columns) * pitch;
      context.roundRect(x, y, pitch - gap, pitch - gap, pitch > 7 ? 2 : 0);
    }
    context.fill();
  }
}

/** Chooses the largest squares that fit; the smallest stand for `share` blocks each. */
function layout(total, width, maxHeight) {
  const most = Math.floor(width / MIN_PITCH);
  for (let columns = Math.ceil(width / MAX_PITCH); ; columns += 1) {
    const pitch = width / columns;
    const places = columns * Math.floor(maxHeight / pitch);
    if (places >= total) return { pitch, columns, share: 1 };
    if (columns >= most) return { pitch, columns, share: total / places };
  }
}
