// Where an attempt stands on the axis. A job that is resumed counts from 0 again: its processes stand one behind the other.

const begins = new Map();

export function setProcesses(producers) {
  for (const process of producers) begins.set(process.producer, process.begins);
}

export const place = (attempt, producer) => attempt + (begins.get(producer) ?? 0);
