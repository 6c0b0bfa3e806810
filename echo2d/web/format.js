// Numbers with their units, short enough for a tile. "-" means that a value is not known yet.

const known = value => value !== null && value !== undefined && Number.isFinite(value);
export const NONE = "-";

export function count(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e7) return `${(value / 1e6).toFixed(1)} M`;
  return Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return long(value);
}

// A time of minutes, hours or days.
export function long(value) {
  if (!known(value)) return NONE;
  if (value < 60) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(value / size < 9.95 ? 2 : value / size < 99.5 ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export const percent = (value, digits = 0) => known(value) ? `${(100 * value).toFixed(digits)} %` : NONE;
export const number = (value, digits = 3) => known(value) ? value.toFixed(digits) : NONE;
export const usd = value => !known(value) ? NONE : value === 0 ? "0" : Math.abs(value) < 0.0995 ? value.toFixed(4) : value < 1000 ? value.toFixed(2) : count(value);
export const perHour = mu => known(mu) ? count(3600 * mu) : NONE;

// A tick's value with as many digits as neighbouring ticks need to differ.
export function tick(value, step) {
  if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toFixed(2)} M`;
  if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toFixed(1)} k`;
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  return value.toFixed(digits);
}
