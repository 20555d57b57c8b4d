// Tables as CSV (RFC 4180).

// A spreadsheet runs text that begins so as a formula; names come from training jobs, so it gets a quote before it.
const FORMULA = /^[=+\-@\t\r]/;

function cell(value) {
  if (value == null) return "";
  const text = typeof value === "string" && FORMULA.test(value) && value !== "-Infinity" ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const toCsv = (header, rows) => [header, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

export function download(name, header, rows) {
  const address = URL.createObjectURL(new Blob([toCsv(header, rows)], { type: "text/csv;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  URL.revokeObjectURL(address);
}
