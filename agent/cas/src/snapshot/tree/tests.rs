use std::collections::BTreeMap;

use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use proptest::prelude::*;
use prost::Message;

use super::message::{MAX_ENTRY, is_segment};
use super::*;
use crate::remote::digest_to_wire;
use crate::{Memory, digest_of};

async fn keep(store: &Memory, directory: Directory) -> Digest {
    let (digest, bytes) = directory.encode();
    store.write_batch(vec![(digest, bytes)]).await.remove(0).unwrap();
    digest
}

fn nested(children: &[(&str, Digest)]) -> Directory {
    let directories = children.iter().map(|(name, digest)| ((*name).to_owned(), *digest)).collect();
    Directory { directories, ..Directory::default() }
}

fn node(name: &str) -> reapi::FileNode {
    reapi::FileNode {
        name: name.to_owned(),
        digest: Some(digest_to_wire(&Digest::EMPTY)),
        ..Default::default()
    }
}

/// Decodes a hand-made message, which its author may have made wrong.
fn decode(message: reapi::Directory) -> Result<Directory, TreeError> {
    let bytes = message.encode_to_vec();
    Directory::decode(digest_of(&bytes), &bytes)
}

#[test]
fn test_decode_refuses_names_that_are_no_segments() {
    for name in ["", ".", "..", "a/b", "/a", "a\0b", &"x".repeat(256)] {
        let file = reapi::Directory { files: vec![node(name)], ..Default::default() };
        assert!(matches!(decode(file), Err(TreeError::Name { .. })), "{name:?}");
        let digest = Some(digest_to_wire(&Digest::EMPTY));
        let directories = vec![reapi::DirectoryNode { name: name.to_owned(), digest }];
        let directory = reapi::Directory { directories, ..Default::default() };
        assert!(matches!(decode(directory), Err(TreeError::Name { .. })), "{name:?}");
        let link = reapi::SymlinkNode { name: name.to_owned(), target: "x".into(), ..Default::default() };
        let link = reapi::Directory { symlinks: vec![link], ..Default::default() };
        assert!(matches!(decode(link), Err(TreeError::Name { .. })), "{name:?}");
    }
}

#[test]
fn test_decode_refuses_what_is_not_canonical() {
    let unsorted = reapi::Directory { files: vec![node("b"), node("a")], ..Default::default() };
    assert!(matches!(decode(unsorted), Err(TreeError::NotCanonical { .. })));
    let twice = reapi::Directory { files: vec![node("a"), node("a")], ..Default::default() };
    assert!(matches!(decode(twice), Err(TreeError::NotCanonical { .. })));
    let digest = Some(digest_to_wire(&Digest::EMPTY));
    let directories = vec![reapi::DirectoryNode { name: "a".into(), digest }];
    let across = reapi::Directory { files: vec![node("a")], directories, ..Default::default() };
    assert!(matches!(decode(across), Err(TreeError::NotCanonical { .. })));
    let properties = Some(reapi::NodeProperties::default());
    let foreign = reapi::Directory { node_properties: properties, ..Default::default() };
    assert!(matches!(decode(foreign), Err(TreeError::NotCanonical { .. })));

    let mut unknown = reapi::Directory { files: vec![node("a")], ..Default::default() }.encode_to_vec();
    unknown.extend([0x78, 1]); // field 15, a number
    let refused = Directory::decode(digest_of(&unknown), &unknown);
    assert!(matches!(refused, Err(TreeError::NotCanonical { .. })));
    let refused = Directory::decode(digest_of(b"\xff\xff"), b"\xff\xff");
    assert!(matches!(refused, Err(TreeError::Malformed { .. })));
}

#[test]
fn test_decode_refuses_contents_without_a_digest() {
    let good = digest_to_wire(&Digest::EMPTY);
    let upper = reapi::Digest { hash: good.hash.to_uppercase(), ..good.clone() };
    let short = reapi::Digest { hash: "abc".into(), ..good.clone() };
    let negative = reapi::Digest { size_bytes: -1, ..good };
    for digest in [None, Some(upper), Some(short), Some(negative)] {
        let files = vec![reapi::FileNode { digest, ..node("a") }];
        let refused = decode(reapi::Directory { files, ..Default::default() });
        assert!(matches!(refused, Err(TreeError::Content { .. })));
    }
}

#[test]
fn test_decode_ends_at_the_first_wrong_entry() {
    // Two bytes each here, a hundred when they are understood, and garbage at the end that is never reached.
    let nothings = [[0x0a, 0].repeat(1_000_000), vec![0xff; 20]].concat();
    let refused = Directory::decode(digest_of(&nothings), &nothings);
    assert!(matches!(refused, Err(TreeError::Name { name, .. }) if name.is_empty()));
    let large = reapi::Directory { files: vec![node(&"x".repeat(MAX_ENTRY))], ..Default::default() };
    assert!(matches!(decode(large), Err(TreeError::LargeEntry { limit: MAX_ENTRY, .. })));
}

#[test]
fn test_decode_refuses_numbers_in_more_bytes_than_they_need() {
    let good = reapi::Directory { files: vec![node("a")], ..Default::default() }.encode_to_vec();
    let (length, rest) = (good[1], &good[2..]);
    for long in [[&[0x8a, 0, length], rest].concat(), [&[0x0a, length | 0x80, 0], rest].concat()] {
        let refused = Directory::decode(digest_of(&long), &long);
        assert!(matches!(refused, Err(TreeError::NotCanonical { .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn test_link_that_leads_out_of_one_of_its_places_is_refused() {
    let store = Memory::new();
    let link = Directory { links: vec![("up".into(), "../x".into())], ..Directory::default() };
    let inside = keep(&store, link.clone()).await;
    let root = keep(&store, nested(&[("d", inside)])).await;
    list(&store, root).await.unwrap();
    let refused = list(&store, inside).await;
    assert!(matches!(refused, Err(TreeError::Link { path, .. }) if path == "up"));
}

async fn chain(store: &Memory, depth: usize) -> Digest {
    let mut root = keep(store, Directory::default()).await;
    for _ in 1..depth {
        root = keep(store, nested(&[("d", root)])).await;
    }
    root
}

#[tokio::test]
async fn test_tree_may_be_as_deep_as_the_limit_and_no_deeper() {
    let store = Memory::new();
    fetch(&store, chain(&store, MAX_DEPTH).await).await.unwrap();
    let deeper = fetch(&store, chain(&store, MAX_DEPTH + 1).await).await;
    assert!(matches!(deeper, Err(TreeError::TooDeep { limit: MAX_DEPTH })));
}

#[tokio::test]
async fn test_tree_that_is_shallow_level_by_level_but_deep_along_a_path_is_refused() {
    // Every directory is named by the root too, so all of them are read with the second level.
    let store = Memory::new();
    let mut all = vec![keep(&store, Directory::default()).await];
    for _ in 0..MAX_DEPTH {
        all.push(keep(&store, nested(&[("d", all[all.len() - 1])])).await);
    }
    let names: Vec<String> = (0..all.len()).map(|i| format!("{i:04}")).collect();
    let children: Vec<(&str, Digest)> = names.iter().map(String::as_str).zip(all).collect();
    let root = keep(&store, nested(&children)).await;
    assert!(matches!(fetch(&store, root).await, Err(TreeError::TooDeep { .. })));
}

#[tokio::test]
async fn test_exponential_trees_are_refused_by_their_sums() {
    let store = Memory::new();
    let mut directories = keep(&store, Directory::default()).await;
    let file = Directory { files: vec![("f".into(), Digest::EMPTY, false)], ..Directory::default() };
    let many = (0..10_000).map(|i| (format!("f{i}"), Digest::EMPTY, false)).collect();
    let mut files = keep(&store, Directory { files: many, ..file }).await;
    for _ in 0..30 {
        directories = keep(&store, nested(&[("a", directories), ("b", directories)])).await;
    }
    for _ in 0..10 {
        files = keep(&store, nested(&[("a", files), ("b", files)])).await;
    }
    let refused = fetch(&store, directories).await;
    assert!(matches!(refused, Err(TreeError::TooManyDirectories { limit: MAX_DIRECTORIES })));
    let refused = fetch(&store, files).await;
    assert!(matches!(refused, Err(TreeError::TooManyFiles { limit: MAX_FILES })));
}

#[tokio::test]
async fn test_paths_may_be_as_long_as_the_limit_and_no_longer() {
    let store = Memory::new();
    for (longer, refused) in [(0, false), (1, true)] {
        // 20 directories of 200 bytes and a slash, and the rest as the name of a file.
        let name = "f".repeat(MAX_PATH - 20 * 201 + longer);
        let leaf = Directory { files: vec![(name, Digest::EMPTY, false)], ..Directory::default() };
        let mut root = keep(&store, leaf).await;
        for _ in 0..20 {
            root = keep(&store, nested(&[(&"d".repeat(200), root)])).await;
        }
        let result = fetch(&store, root).await;
        assert_eq!(matches!(result, Err(TreeError::PathTooLong { limit: MAX_PATH })), refused);
        assert_eq!(result.is_ok(), !refused);
    }
}

#[tokio::test]
async fn test_directories_are_not_read_that_would_take_too_much_memory() {
    // None of these is in the store: that is not even noticed.
    let store = Memory::new();
    let large = |i: u8| Digest { hash: [i; 32], size: MAX_MESSAGE };
    let directories: Vec<(String, Digest)> = (10..20).map(|i| (i.to_string(), large(i))).collect();
    let root = keep(&store, Directory { directories, ..Directory::default() }).await;
    assert!(matches!(fetch(&store, root).await, Err(TreeError::TooHeavy { limit: MAX_WEIGHT })));
}

#[tokio::test]
async fn test_missing_forged_and_huge_directories_are_errors() {
    let store = Memory::new();
    let absent = digest_of(b"absent");
    let root = keep(&store, nested(&[("d", absent)])).await;
    let error = fetch(&store, root).await.unwrap_err();
    assert!(matches!(error, TreeError::Read(ReadError::Absent { digest }) if digest == absent));
    let forged = digest_of(b"forged");
    store.corrupt(forged, Directory::default().encode().1);
    let root = keep(&store, nested(&[("d", forged)])).await;
    let error = fetch(&store, root).await.unwrap_err();
    assert!(matches!(error, TreeError::Read(ReadError::Corrupt { .. })));
    let huge = Digest { hash: [1; 32], size: MAX_MESSAGE + 1 };
    assert!(matches!(fetch(&store, huge).await, Err(TreeError::TooLarge { .. })));
}

#[tokio::test]
async fn test_list_names_every_file_at_every_place() {
    let store = Memory::new();
    let leaf = Directory { files: vec![("x".into(), Digest::EMPTY, true)], ..Directory::default() };
    let leaf = keep(&store, leaf).await;
    let root = keep(&store, nested(&[("a", leaf), ("b", leaf)])).await;
    let paths: Vec<String> = list(&store, root).await.unwrap().into_iter().map(|entry| entry.path).collect();
    assert_eq!(paths, ["a/x", "b/x"]);
}

#[test]
fn test_tally_refuses_what_reading_would_refuse_and_weighs_equal_directories_once() {
    let directory = || Directory { links: vec![("name".into(), "target".into())], ..Directory::default() };
    let mut tally = Tally::default();
    for _ in 0..3 {
        assert_eq!(tally.encode(directory()).unwrap(), directory().encode());
    }
    assert_eq!((tally.directories, tally.files, tally.weight), (3, 3, directory().weight()));
    let refusal = |mut tally: Tally| tally.encode(directory()).unwrap_err();
    let full = Tally { weight: MAX_WEIGHT, ..Tally::default() };
    assert!(matches!(refusal(full), TreeError::TooHeavy { .. }));
    let full = Tally { files: MAX_FILES, ..Tally::default() };
    assert!(matches!(refusal(full), TreeError::TooManyFiles { .. }));
    let full = Tally { directories: MAX_DIRECTORIES, ..Tally::default() };
    assert!(matches!(refusal(full), TreeError::TooManyDirectories { .. }));
}

proptest! {
    #[test]
    fn test_encode_is_canonical_for_any_order_and_decodes_to_the_same(
        names in proptest::collection::btree_map("[^/\0]{1,20}", 0..3u8, 0..20),
        seed in any::<u64>(),
    ) {
        prop_assume!(names.keys().all(|name| is_segment(name)));
        let build = |names: Vec<(&String, &u8)>| {
            let mut directory = Directory::default();
            for (name, kind) in names {
                match kind {
                    0 => directory.files.push((name.clone(), digest_of(name.as_bytes()), seed % 2 == 0)),
                    1 => directory.directories.push((name.clone(), digest_of(name.as_bytes()))),
                    _ => directory.links.push((name.clone(), "target".into())),
                }
            }
            directory
        };
        let sorted = build(BTreeMap::iter(&names).collect());
        let mut shuffled: Vec<_> = names.iter().collect();
        shuffled.sort_by_key(|(name, _)| digest_of(format!("{seed}{name}").as_bytes()));
        let (digest, bytes) = build(shuffled).encode();
        prop_assert_eq!(&bytes, &sorted.clone().encode().1);
        prop_assert!(sorted.weight() >= bytes.len() as u64);
        prop_assert_eq!(Directory::decode(digest, &bytes).unwrap(), sorted);
    }

    #[test]
    fn test_decode_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(directory) = Directory::decode(digest_of(&bytes), &bytes) {
            prop_assert_eq!(directory.encode().1, bytes);
        }
    }
}

#[tokio::test]
async fn test_parts_of_a_tree_stand_alone_unless_a_link_leads_out() {
    let store = Memory::default();
    let files = |names: &[&str]| Directory {
        files: names.iter().map(|name| ((*name).to_owned(), Digest::EMPTY, false)).collect(),
        ..Directory::default()
    };
    let two = keep(&store, files(&["a", "b"])).await;
    let links = vec![("l".to_owned(), "../two/a".to_owned())];
    let leads_out = keep(&store, Directory { links, ..files(&["c"]) }).await;
    let named = keep(&store, nested(&[("two", two), ("out", leads_out)])).await;
    let root = keep(&store, nested(&[("named", named)])).await;
    assert_eq!(part(&store, root, "named/two").await.unwrap(), Some(two));
    for none in ["named/three", "two", "named/two/a"] {
        assert_eq!(part(&store, root, none).await.unwrap(), None, "{none}");
    }
    assert!(fetch(&store, root).await.is_ok(), "inside of the whole it is a link like others");
    assert!(matches!(part(&store, root, "named/out").await, Err(TreeError::Link { .. })));

    let (alone, message) = file_alone(&store, two, "b").await.unwrap().unwrap();
    assert_eq!(alone, keep(&Memory::default(), files(&["b"])).await);
    assert_eq!(digest_of(&message), alone);
    assert!(file_alone(&store, two, "c").await.unwrap().is_none());
}
