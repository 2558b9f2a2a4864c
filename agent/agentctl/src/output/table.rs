//! Tables that fit their paper.

use unicode_width::UnicodeWidthStr;

use super::Paper;
use super::text::{Tone, clean, cut, cut_middle};

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
    headings: Vec<String>,
    /// Columns of numbers, whose cells are aligned right.
    right: Vec<usize>,
    /// Columns of names, which may be cut.
    names: Vec<usize>,
    /// The first cell is never cut.
    whole_first: bool,
    rows: Vec<Vec<Cell>>,
}

/// The last cell of a row is cut to this many columns before names are cut.
const ROOMY: usize = 16;
/// The same where the first cells are not cut.
const MUCH: usize = 28;
/// In a table that is too wide, longer names than this have a line of their own, where names are not cut.
pub(crate) const LONG_NAME: usize = 32;
/// It is cut to no fewer columns than this: with less room it is left out.
const LEAST: usize = 8;
/// Names are cut to no fewer columns than this, which the key of an environment has.
const LEAST_NAME: usize = 18;

impl Table {
    /// An empty table; the columns `right` hold numbers. The first column is one of names.
    pub(crate) fn new(headings: &[impl AsRef<str>], right: &[usize]) -> Table {
        Table {
            headings: headings.iter().map(|heading| heading.as_ref().to_owned()).collect(),
            right: right.to_vec(),
            names: vec![0],
            whole_first: false,
            rows: Vec::new(),
        }
    }

    /// The same with these columns of names.
    pub(crate) fn with_names(self, names: &[usize]) -> Table {
        Table { names: names.to_vec(), ..self }
    }

    /// The same with a first column that can be copied: a name too long for its column has a line of its own, and what
    /// belongs to it is below.
    pub(crate) fn whole_first(self) -> Table {
        Table { whole_first: true, ..self }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table as text. Where it is too wide, its last column is cut at the end, and names in the middle, because their
    /// ends tell them apart.
    pub(crate) fn render(&self, paper: Paper) -> String {
        let heading = |text: &String| Cell::new(Tone::Strong, text);
        let head: Vec<Cell> = self.headings.iter().map(heading).collect();
        let widths = self.widths(&head, paper.width);
        let mut text = String::new();
        for row in [&head].into_iter().chain(&self.rows) {
            let is_alone = self.whole_first && row[0].text.width() > widths[0];
            if is_alone {
                text.push_str(&paper.ink.paint(row[0].tone, &row[0].text));
                text.push('\n');
            }
            let cells = row.iter().zip(&widths).enumerate();
            let cells = cells.map(|(at, (cell, width))| match at {
                0 if is_alone => " ".repeat(*width),
                _ => self.cell(at, cell, *width, paper),
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    /// The width of each column that is shown.
    fn widths(&self, head: &[Cell], room: usize) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(Vec::as_slice).chain([head]);
            cells.filter_map(|row| row.get(column)).map(|cell| cell.text.width()).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..head.len()).map(width).collect();
        let over =
            |widths: &[usize]| widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(room + 2);
        let last = head.len() - 1;
        let may_cut_last = !self.right.contains(&last) && !self.names.contains(&last);
        let cut_last = |widths: &mut Vec<usize>, least: usize| {
            let least = widths[last].min(least);
            widths[last] = widths[last].saturating_sub(over(widths)).max(least);
        };
        if self.whole_first && over(&widths) > 0 {
            self.set_apart(&mut widths[0], LONG_NAME);
        }
        if may_cut_last {
            cut_last(&mut widths, if self.whole_first { MUCH } else { ROOMY });
        }
        while over(&widths) > 0 {
            let widest = self.names.iter().copied().max_by_key(|name| widths[*name]);
            let Some(widest) = widest.filter(|name| widths[*name] > LEAST_NAME) else { break };
            widths[widest] -= 1;
        }
        if self.whole_first {
            let narrowed = widths[0];
            self.set_apart(&mut widths[0], narrowed);
        }
        if may_cut_last {
            let taken = widths.iter().map(|width| width + 2).sum::<usize>();
            widths[last] = (widths[last] + (room + 2).saturating_sub(taken)).min(width(last));
            cut_last(&mut widths, LEAST);
            widths.truncate(if over(&widths) > 0 { last } else { head.len() });
        }
        widths
    }

    /// Makes the first column as wide as the names in it that are no wider than `most`: the others have lines of their own.
    fn set_apart(&self, first: &mut usize, most: usize) {
        let names = self.rows.iter().filter_map(|row| Some(row.first()?.text.width()));
        let widest = names.filter(|width| *width <= most).max();
        *first = widest.map_or(*first, |widest| widest.max(self.headings[0].width())).min(*first);
    }

    fn cell(&self, column: usize, cell: &Cell, width: usize, paper: Paper) -> String {
        let length = cell.text.width();
        if length > width {
            let cut: fn(&str, usize) -> String = if self.names.contains(&column) { cut_middle } else { cut };
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
            a-name-th…y-long-1     0  title
        ");
    }

    #[test]
    fn test_names_give_way_evenly_and_what_has_no_room_is_left_out() {
        let mut table = Table::new(&["JOB", "METRIC", "VALUE", "SAID"], &[2]).with_names(&[0, 1]);
        let names =
            ["a-job-with-a-very-long-name-x7k2p", "a-metric-with-a-very-long-name/loss"].map(Cell::from);
        table.row(names.into_iter().chain(["0.123456".into(), "something".into()]));
        let at = |width| table.render(Paper { ink: Ink::new(false), width });
        insta::assert_snapshot!(at(62), @r"
            JOB                   METRIC                  VALUE  SAID
            a-job-with…ame-x7k2p  a-metric-…name/loss  0.123456  something
        ");
        insta::assert_snapshot!(at(50), @r"
            JOB                 METRIC                 VALUE
            a-job-wit…me-x7k2p  a-metric-…ame/loss  0.123456
        ");
        assert!(
            at(10_000)
                .contains("-very-long-name-x7k2p  a-metric-with-a-very-long-name/loss  0.123456  something")
        );
    }

    #[test]
    fn test_a_name_that_is_to_be_copied_is_never_cut() {
        let mut table = table().whole_first();
        table.row(["a-name-that-is-very-long-1".into(), "0".into(), "a title with several words".into()]);
        insta::assert_snapshot!(table.render(Paper { ink: Ink::new(false), width: 52 }), @r"
            NAME     EXIT  TITLE
            train-1   137  a long title with words
            x              short
            a-name-that-is-very-long-1
                        0  a title with several words
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
