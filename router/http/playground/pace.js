// When work that is asked for often is done.

const REST = 3; // times as long as the work took

/** Returns a function that has `draw` called at the next frame, and never for most of the time. */
export function perFrame(draw) {
  let asked = false;
  let earliest = 0;
  const frame = () => {
    const began = performance.now();
    if (began < earliest) return requestAnimationFrame(frame);
    asked = false;
    draw();
    const ended = performance.now();
    earliest = ended + REST * (ended - began);
  };
  return () => {
    if (!asked) requestAnimationFrame(frame);
    asked = true;
  };
}

/** Returns a function that has `work` called once within `milliseconds`, however often it is asked. */
export function within(milliseconds, work) {
  let timer = 0;
  return () => {
    timer ||= setTimeout(() => {
      timer = 0;
      work();
    }, milliseconds);
  };
}
