//! Text that people bring, however their editor or their shell saved it.
//!
//! Every file that is read as text is read here: UTF-8 with or without a mark at its begin, and the UTF-16 that
//! PowerShell writes. Lines may end as on Windows; each parser takes that. Where it matters to a shell on Linux,
//! [`windows_script`] finds it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// The most bytes of a file: more than any parser takes.
const LARGEST: u64 = 16 << 20;

/// The content of a file.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`] where it is no text, and [`io::ErrorKind::FileTooLarge`].
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    decode(bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// What stands between blanks and signs of the shell.
pub(super) fn words(command: &str) -> impl Iterator<Item = &str> {
    command.split(|c: char| c.is_whitespace() || "\"'`;|&<>()=".contains(c))
}

fn decode(bytes: Vec<u8>) -> Option<String> {
    let wide = |text: &[u8], unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = text.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        String::from_utf16(&units).ok()
    };
    match bytes.as_slice() {
        [0xff, 0xfe, text @ ..] => wide(text, u16::from_le_bytes),
        [0xfe, 0xff, text @ ..] => wide(text, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, text @ ..] => String::from_utf8(text.to_vec()).ok(),
        _ => String::from_utf8(bytes).ok(),
    }
}

/// The first script of a command that is in `code` and ends its lines as on Windows. The kernel does not find the
/// interpreter of such a file, and a shell takes the carriage return for a part of each word.
pub(crate) fn windows_script<'a>(code: &Path, command: &'a str) -> Option<&'a str> {
    words(command).filter(|word| !word.is_empty() && Path::new(word).is_relative()).find(|word| {
        let is_shell = Path::new(word).extension().is_some_and(|ending| ending == "sh" || ending == "bash");
        let path = code.join(word);
        // Not a pipe, which is waited for.
        if !path.is_file() {
            return false;
        }
        let mut begin = Vec::new();
        let read = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut begin));
        let first = begin.split(|byte| *byte == b'\n').next().unwrap_or_default();
        read.is_ok()
            && begin.contains(&b'\n')
            && first.ends_with(b"\r")
            && (is_shell || first.starts_with(b"#!"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::conda;
    use super::super::tests::project;
    use super::*;

    #[test]
    fn test_texts_of_windows_are_read() {
        let dir = project(&[]);
        let path = dir.path().join("c.yml");
        let text = "dependencies: [ä]\r\n";
        let marked = format!("\u{feff}{text}");
        let wide = |of: fn(u16) -> [u8; 2]| marked.encode_utf16().flat_map(of).collect::<Vec<u8>>();
        for bytes in
            [wide(u16::to_le_bytes), wide(u16::to_be_bytes), marked.clone().into_bytes(), text.into()]
        {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path).unwrap(), text);
        }
        for bytes in [&b"dependencies: [\xe9]\n"[..], b"\xff\xfe\x00\xd8"] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
            let fault = super::super::read(&path, "the conda file").unwrap_err();
            assert_eq!(fault.fix.unwrap(), "save it as UTF-8");
        }
        // Nothing is cut off: its parser says that it is too long, or nobody reads it.
        std::fs::write(&path, vec![b'-'; 10 << 20]).unwrap();
        let fault = conda::document(&read(&path).unwrap(), &path, &mut Vec::new()).unwrap_err();
        assert!(fault.what.contains("more than 1 MiB"), "{fault}");
        File::options().write(true).open(&path).unwrap().set_len(LARGEST + 1).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn test_a_script_of_windows_is_found_where_it_matters() {
        let dir = project(&[
            ("go.sh", "echo\r\n"),
            ("go", "#!/bin/sh\r\nexit\r\n"),
            ("t.py", "print()\r\n"),
            ("unix.sh", "#!/bin/sh\necho '\r'\n"),
            ("one-line.sh", "echo\r"),
        ]);
        let found = |command| windows_script(dir.path(), command);
        assert_eq!(found("cd x && ./go a"), Some("./go"));
        assert_eq!(found("bash go.sh"), Some("go.sh"));
        for fine in ["python t.py", "bash unix.sh", "bash one-line.sh", "bash gone.sh", ""] {
            assert_eq!(found(fine), None, "{fine}");
        }
    }
}
