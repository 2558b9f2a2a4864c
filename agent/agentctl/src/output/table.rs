//! Tables that fit their paper.

use unicode_width::UnicodeWidthStr;

use super::Paper;
use super::text::{Tone, clean, cut};

/// One cell.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A cell in a colour.
    pub(crate) fn new(tone: Tone, text: impl AsRef<str>) -> Cell {
        Cell { text: clean(text.as_ref()).into_owned(), tone }
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(Tone::Plain, text)
    }
}

/// Rows below headings.
#[derive(Debug)]
pub(crate) struct Table {
    headings: Vec<&'static str>,
    /// Columns of numbers, whose cells are aligned right.
    right: Vec<usize>,
    rows: Vec<Vec<Cell>>,
}

/// The last cell of a row is cut to no fewer columns than this.
const LEAST: usize = 8;
/// The same for the first cell.
const LEAST_NAME: usize = 16;

impl Table {
    /// An empty table; the columns `right` hold numbers.
    pub(crate) fn new(headings: &[&'static str], right: &[usize]) -> Table {
        Table { headings: headings.to_vec(), right: right.to_vec(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table as text. Its last column is cut to fit; if that is not enough, the first too, because commands
    /// accept the beginning of a name.
    pub(crate) fn render(&self, paper: Paper) -> String {
        let heading = |text: &&str| Cell::new(Tone::Strong, text);
        let head: Vec<Cell> = self.headings.iter().map(heading).collect();
        let last = self.headings.len().saturating_sub(1);
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&head]).filter_map(|row| row.get(column));
            cells.map(|cell| cell.text.width()).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..=last).map(width).collect();
        let before = |widths: &[usize]| widths[..last].iter().map(|width| width + 2).sum::<usize>();
        let over = (before(&widths) + widths[last].min(LEAST)).saturating_sub(paper.width);
        if last > 0 {
            widths[0] = widths[0].saturating_sub(over).max(widths[0].min(LEAST_NAME));
        }
        let before = before(&widths);
        widths[last] = widths[last].min(paper.width.saturating_sub(before).max(LEAST));
        let mut text = String::new();
        for row in [&head].into_iter().chain(&self.rows) {
            let cells = row.iter().zip(&widths).enumerate();
            let cells = cells.map(|(at, (cell, width))| self.cell(at, cell, *width, paper));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    fn cell(&self, column: usize, cell: &Cell, width: usize, paper: Paper) -> String {
        let length = cell.text.width();
        if length > width {
            return paper.ink.paint(cell.tone, &cut(&cell.text, width)).into_owned();
        }
        let (blanks, text) = (" ".repeat(width - length), paper.ink.paint(cell.tone, &cell.text));
        if self.right.contains(&column) { format!("{blanks}{text}") } else { format!("{text}{blanks}") }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::Ink;
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["NAME", "EXIT", "TITLE"], &[1]);
        table.row(["train-1".into(), Cell::new(Tone::Bad, "137"), "a long\ntitle with words".into()]);
        table.row(["x".into(), Cell::default(), "short".into()]);
        table
    }

    #[test]
    fn test_columns_line_up_and_the_last_is_cut() {
        let paper = Paper { ink: Ink::new(false), width: 27 };
        insta::assert_snapshot!(table().render(paper), @r"
            NAME     EXIT  TITLE
            train-1   137  a long titl…
            x              short
        ");
    }

    #[test]
    fn test_a_long_name_leaves_room_for_the_other_columns() {
        let mut table = table();
        table.row(["a-name-that-is-very-long-1".into(), "0".into(), "title".into()]);
        insta::assert_snapshot!(table.render(Paper { ink: Ink::new(false), width: 34 }), @r"
            NAME                EXIT  TITLE
            train-1              137  a long …
            x                         short
            a-name-that-is-ve…     0  title
        ");
    }

    #[test]
    fn test_colours_do_not_move_columns() {
        let strip = |text: String| {
            ["0", "1", "31"].iter().fold(text, |text, code| text.replace(&format!("\x1b[{code}m"), ""))
        };
        let coloured = table().render(Paper { ink: Ink::new(true), width: 80 });
        assert!(coloured.contains("\x1b[31m137\x1b[0m"));
        assert_eq!(strip(coloured), table().render(Paper { ink: Ink::new(false), width: 80 }));
    }
}
